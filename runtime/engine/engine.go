// Package engine is agentbox's core: the Engine, which implements runtime.Service on this host
// and orders the steps of every verb. Package runtime/local opens one.
//
// Each verb is a method of the Engine, in the frame of verb.go, and is carried out by one of
// the Engine's rooms. It looks the sandbox up in the store, locks it, writes an intent to the
// journal if it has more than one step, and then calls one leaf per step: images for the lower
// directories, a Backend for the container, overlay for its files, criu for its processes,
// store for what must last. A verb with several steps keeps an undo stack that runs on failure.
// What a killed process leaves, RecoverInterrupted finishes or takes back, from the journal.
package engine

import (
	"cmp"
	"context"
	"log/slog"
	"os"
	"slices"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/store"
)

// Engine is the embedded Service: it works on this host, without a daemon. Its methods are
// the verbs, each in the frame of verb.go; the work is done by its rooms. A room names in its
// type the other rooms that it uses.
type Engine struct {
	*core

	// The verbs, by the parts of runtime.Service.
	sandboxVerbs
	checkpointVerbs
	imageVerbs
	leaseVerbs
	hostVerbs

	// The records that verbs keep beside the store's.
	events   *eventLog
	effects  *effectLog
	restarts *restartLog
	marks    *marks

	// What is done with images, checkpoints and sandboxes.
	admission   *admission
	images      *localImages
	transfers   *transfers
	sandboxes   *sandboxes
	checkpoints *checkpoints
	restores    *restores

	// What is done without being asked.
	limits     *limits
	leases     *leases
	supervisor *supervisor
	recovery   *recovery
	upkeep     *upkeep
}

// The verbs of each part of the Service.
type (
	sandboxVerbs    struct{ e *Engine }
	checkpointVerbs struct{ e *Engine }
	imageVerbs      struct{ e *Engine }
	leaseVerbs      struct{ e *Engine }
	hostVerbs       struct{ e *Engine }
)

var (
	_ runtime.SandboxService    = sandboxVerbs{}
	_ runtime.CheckpointService = checkpointVerbs{}
	_ runtime.ImageService      = imageVerbs{}
	_ runtime.LeaseService      = leaseVerbs{}
	_ runtime.HostService       = hostVerbs{}
)

var _ runtime.Local = (*Engine)(nil)

// Options are the parts of an Engine. The Engine closes the store.
type Options struct {
	Run     string
	Store   *store.Store
	Backend string                          // of new sandboxes, and of names that no sandbox has
	Open    func(name string) (Host, error) // called once for each backend, when it is first needed
	Log     *slog.Logger                    // nil: slog.Default

	// TidyAt is the amount of garbage, in bytes of removed checkpoints, at which space
	// is reclaimed automatically; 0: 256 MiB.
	TidyAt int64

	// Supervisor starts the process that enforces limits, takes checkpoints at intervals and
	// ends leases (Engine.Supervise), and passes it the locked file as descriptor 3. The process
	// outlives the caller. Nil: nothing is supervised.
	Supervisor func(lock *os.File) error

	// Observers see each verb and each action that the Engine takes on its own; the first
	// is outermost. Nil ones are ignored.
	Observers []runtime.Observer

	// Policies finds the policy of sandboxes whose request names none, and remembers
	// which policies were used here.
	Policies policy.Finder
}

// New returns an Engine over its parts.
func New(opts Options) *Engine {
	log := opts.Log
	if log == nil {
		log = slog.Default()
	}
	c := &core{
		run: opts.Run, store: opts.Store, first: opts.Backend, make: opts.Open, log: log, policies: opts.Policies,
		observers: slices.DeleteFunc(slices.Clone(opts.Observers), func(o runtime.Observer) bool { return o == nil }),
		hosts:     map[string]*opening{}, under: map[int64]bool{},
	}
	e := &Engine{core: c}
	e.furnish(opts)
	c.afterPanic = func(ctx context.Context) error {
		_, err := e.RecoverInterrupted(ctx)
		return err
	}
	return e
}

// furnish makes the rooms, and gives each the others that it uses.
func (e *Engine) furnish(opts Options) {
	c := e.core
	e.sandboxVerbs, e.checkpointVerbs, e.imageVerbs = sandboxVerbs{e}, checkpointVerbs{e}, imageVerbs{e}
	e.leaseVerbs, e.hostVerbs = leaseVerbs{e}, hostVerbs{e}
	e.events, e.effects, e.restarts, e.marks = new(eventLog), new(effectLog), new(restartLog), new(marks)
	e.admission, e.images, e.transfers = new(admission), new(localImages), new(transfers)
	e.sandboxes, e.checkpoints, e.restores = new(sandboxes), new(checkpoints), new(restores)
	e.limits, e.leases, e.supervisor = new(limits), new(leases), new(supervisor)
	e.recovery, e.upkeep = new(recovery), new(upkeep)

	c.events = e.events
	*e.events = eventLog{core: c}
	*e.effects = effectLog{core: c, events: e.events}
	*e.restarts = restartLog{core: c, events: e.events}
	*e.marks = marks{core: c, restarts: e.restarts}
	*e.admission = admission{core: c}
	*e.images = localImages{core: c}
	*e.transfers = transfers{core: c, images: e.images}
	*e.sandboxes = sandboxes{
		core: c, events: e.events, restarts: e.restarts, marks: e.marks, admission: e.admission,
		checkpoints: e.checkpoints, limits: e.limits, leases: e.leases, supervisor: e.supervisor,
		upkeep: e.upkeep, kept: map[string]string{},
	}
	*e.checkpoints = checkpoints{
		core: c, effects: e.effects, restarts: e.restarts, admission: e.admission, images: e.images,
		limits: e.limits, leases: e.leases, upkeep: e.upkeep,
	}
	*e.restores = restores{
		core: c, events: e.events, restarts: e.restarts, admission: e.admission, transfers: e.transfers,
		sandboxes: e.sandboxes, checkpoints: e.checkpoints, leases: e.leases, supervisor: e.supervisor,
		recovery: e.recovery, upkeep: e.upkeep, engine: e,
	}
	*e.limits = limits{
		core: c, events: e.events, restarts: e.restarts, marks: e.marks, sandboxes: e.sandboxes,
		supervisor: e.supervisor,
	}
	*e.leases = leases{
		core: c, events: e.events, marks: e.marks, sandboxes: e.sandboxes, supervisor: e.supervisor,
		recovery: e.recovery, upkeep: e.upkeep,
	}
	*e.supervisor = supervisor{
		core: c, events: e.events, restarts: e.restarts, marks: e.marks, sandboxes: e.sandboxes,
		restores: e.restores, limits: e.limits, leases: e.leases, recovery: e.recovery, engine: e,
		start: opts.Supervisor,
	}
	*e.recovery = recovery{
		core: c, events: e.events, effects: e.effects, restarts: e.restarts, marks: e.marks,
		sandboxes: e.sandboxes, checkpoints: e.checkpoints, restores: e.restores, leases: e.leases,
		supervisor: e.supervisor,
	}
	*e.upkeep = upkeep{
		core: c, sandboxes: e.sandboxes, restores: e.restores, tidyAt: cmp.Or(opts.TidyAt, 256<<20),
	}
}
