package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/agentbox/agentbox/internal/undo"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine/progress"
	"github.com/agentbox/agentbox/runtime/store"
)

// lockWait is how long a verb waits for one that is about to end, such as the
// clean-up after a sandbox exited, before it reports ErrBusy.
const lockWait = 500 * time.Millisecond

// reapWait is how long a verb waits for the clean-up after an exit.
const reapWait = 5 * time.Minute

// autoWait is how long a verb waits for a checkpoint that no command asked for.
const autoWait = time.Minute

// opReap is the verb of the clean-up after an exit.
const opReap = "reap"

// frozenWait is how long a verb that only uses a sandbox waits for a checkpoint to
// thaw it.
const frozenWait = time.Minute

// execTries bounds how many checkpoints in a row Exec waits for.
const execTries = 10

// core is what all rooms stand on: the records, the backends, the locks and the journal of
// verbs.
type core struct {
	run   string // transient state, e.g. /run/agentbox
	store *store.Store
	first string // the backend of new sandboxes
	make  func(name string) (Host, error)
	log   *slog.Logger

	observers []runtime.Observer
	policies  policy.Finder
	events    *eventLog

	afterPanic func(context.Context) error // recovers the verb that has panicked

	mu    sync.Mutex
	under map[int64]bool      // intents under way in this process
	hosts map[string]*opening // backends in use, by name
	// Locks that say "my caller waits for this sandbox's exit code"; see hold.
	holds map[string]*store.Lock
}

// opening is a backend that is opened on first use.
type opening struct {
	mu   sync.Mutex
	open bool
	Host
}

// host returns the backend of that name. One that takes long to open delays no other.
func (e *core) host(name string) (_ Host, err error) {
	e.mu.Lock()
	h := e.hosts[name]
	if h == nil {
		h = &opening{}
		e.hosts[name] = h
	}
	e.mu.Unlock()

	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.open {
		h.Host, err = e.make(name)
		h.open = err == nil
	}
	return h.Host, err
}

// images returns the images of the backend of new sandboxes.
func (e *core) imageStore() (runtime.Images, error) {
	h, err := e.host(e.first)
	if err == nil && h.Images == nil {
		err = fmt.Errorf("%w: backend %s makes no sandboxes, it only takes on containers that are there",
			runtime.ErrUnsupported, e.first)
	}
	return h.Images, err
}

// Close releases the store.
func (e *core) Close() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, l := range e.holds {
		l.Unlock()
	}
	return e.store.Close()
}

// hold keeps the reaper from removing an --rm sandbox whose exit code this process
// has yet to return to its caller. It is a lock, which this process's death releases.
func (e *core) hold(ctx context.Context, id string) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.holds[id] != nil {
		return nil
	}
	l, err := e.store.Lock(ctx, holdName(id), "wait for the exit", lockWait)
	if err != nil {
		return err
	}
	if e.holds == nil {
		e.holds = map[string]*store.Lock{}
	}
	e.holds[id] = l
	return nil
}

// release ends hold.
func (e *core) release(id string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if l := e.holds[id]; l != nil {
		l.Unlock()
		delete(e.holds, id)
	}
}

// Release gives up the exit code of an --rm sandbox that was started with streams. A
// process that serves many callers calls it for each caller that disconnects.
func (e *core) Release(id string) { e.release(id) }

func holdName(id string) string { return id + ".wait" }

// newID returns 128 random bits as 32 hex digits.
func newID() string {
	var b [16]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// short abbreviates an id for messages.
func short(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}

// fail wraps the error of a verb; nil stays nil.
func fail(op, id string, err error) error {
	if err == nil {
		return nil
	}
	var own *runtime.Error
	if errors.As(err, &own) && own.Op == op {
		return err
	}
	return &runtime.Error{Op: op, ID: id, Err: err}
}

// hint adds a remedy to an error within a verb.
func hint(err error, remedy string) error {
	return &runtime.Error{Err: err, Hint: remedy}
}

// locked is a sandbox whose lock this process holds.
type locked struct {
	store.Sandbox
	host Host
	lock *store.Lock

	steps *progress.Meter // of the verb; nil: its progress is not followed
}

// acquire finds a sandbox and locks it for a verb. It waits up to wait for another
// verb to end.
func (e *core) acquire(ctx context.Context, ref, verb string, wait time.Duration) (*locked, error) {
	sb, err := e.find(ctx, ref)
	if err != nil {
		return nil, err
	}
	host, err := e.host(sb.Backend)
	if err != nil {
		return nil, err
	}
	lock, err := e.lock(ctx, sb.ID, verb, wait)
	if err != nil {
		return nil, err
	}
	// The record may have changed, or gone, while we waited.
	if sb, err = e.store.Sandbox(ctx, sb.ID); err != nil {
		lock.Unlock()
		return nil, err
	}
	return &locked{Sandbox: sb, host: host, lock: lock}, nil
}

// lock locks a sandbox for a verb. It waits longer if background work holds the lock,
// and gives up its turn while it waits.
func (e *core) lock(ctx context.Context, id, verb string, wait time.Duration) (*store.Lock, error) {
	lock, err := e.store.Lock(ctx, id, verb, wait)
	if by := e.store.Holder(id); errors.Is(err, runtime.ErrBusy) && (by == opReap || by == opWatch) {
		// The clean-up after the last run: unmounting can take as long as the disk needs
		// for unwritten data. Or the supervisor stops or restarts the sandbox.
		lock, err = e.lockAside(ctx, id, verb, reapWait)
	}
	if errors.Is(err, runtime.ErrBusy) && verb != opInterval {
		if by := e.store.Holder(id); by == opInterval || by == opPrompt {
			lock, err = e.lockAside(ctx, id, verb, autoWait)
		}
	}
	return lock, err
}

func (e *core) lockAside(ctx context.Context, id, verb string, wait time.Duration) (*store.Lock, error) {
	defer runtime.Aside(ctx)()
	return e.store.Lock(ctx, id, verb, wait)
}

// errUnfinished keeps an intent in the journal: recovery does the rest of the verb.
var errUnfinished = errors.New("the next command will finish it")

// intent writes a journal entry, runs fn and removes the entry. If fn fails it has
// undone its work, and the entry is removed too; if this process is killed the entry
// stays for recovery.
func (e *core) intent(ctx context.Context, in store.Intent, data any, fn func(seq int64) error) (err error) {
	if in.Data, err = json.Marshal(data); err != nil {
		return err
	}
	seq, end, err := e.begin(ctx, in)
	if err != nil {
		return err
	}
	defer end()
	if err = fn(seq); errors.Is(err, errUnfinished) {
		return err
	}
	done, cancel := context.WithTimeout(context.WithoutCancel(ctx), undo.Timeout)
	defer cancel()
	return errors.Join(err, e.store.Done(done, seq))
}

// begin records an intent and marks it as under way in this process until end is
// called. Other verbs of this process then need not check whether it was abandoned;
// in a service, each of them would. The caller holds the sandbox's lock.
func (e *core) begin(ctx context.Context, in store.Intent) (seq int64, end func(), err error) {
	if err := e.nothingLeft(ctx, in); err != nil {
		return 0, nil, err
	}
	if seq, err = e.store.Begin(ctx, in); err != nil {
		return 0, nil, err
	}
	// A reader that saw the intent before this line will find the sandbox locked.
	e.mu.Lock()
	defer e.mu.Unlock()
	e.under[seq] = true
	return seq, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		delete(e.under, seq)
	}, nil
}

// nothingLeft refuses a verb on a sandbox with an interrupted verb that recovery could
// not finish: finished later, that verb would undo this one's work.
func (e *core) nothingLeft(ctx context.Context, in store.Intent) error {
	if in.Op == opRemove { // which makes the interrupted verb moot
		return nil
	}
	left, err := e.leftIn(ctx, in.Sandbox)
	if len(left) > 0 {
		return fmt.Errorf("%w: its last %s was interrupted and is not finished; `agentbox recover` finishes it, or says why it cannot", runtime.ErrState, left[0].Op)
	}
	return err
}

// leftIn lists the intents of a sandbox that are not under way in this process.
func (e *core) leftIn(ctx context.Context, id string) ([]store.Intent, error) {
	intents, err := e.store.Intents(ctx)
	return slices.DeleteFunc(intents, func(in store.Intent) bool { return in.Sandbox != id || e.underWay(in.Seq) }), err
}

// underWay reports whether this process itself works on an intent.
func (e *core) underWay(seq int64) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.under[seq]
}

// advance records how far an intent has come; lazy is as in store.Intent.
func (e *core) advance(ctx context.Context, seq int64, data any, lazy bool) error {
	b, err := json.Marshal(data)
	if err != nil {
		return err
	}
	return e.store.Update(ctx, seq, b, lazy)
}

// spec decodes the stored spec of a sandbox.
func spec(sb store.Sandbox) (runtime.Spec, error) {
	s, err := specOf(sb.ID, sb.Spec)
	if err == nil && s.ID != "" && s.ID != sb.ID { // the id becomes part of paths
		err = fmt.Errorf("spec of %s: %w: it is of %.40q", short(sb.ID), runtime.ErrCorrupt, s.ID)
	}
	return s, err
}

// specOf decodes the spec of a sandbox or of a foreign checkpoint.
func specOf(id string, text json.RawMessage) (s runtime.Spec, err error) {
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("spec of %s: %w: %w", short(id), runtime.ErrCorrupt, err)
	}
	return s, nil
}

// identity returns the environment variables that identify a sandbox to its processes.
func identity(s runtime.Spec, attempt int) []string {
	return []string{
		"AGENTBOX_SANDBOX=" + s.ID,
		"AGENTBOX_SANDBOX_NAME=" + s.Name,
		"AGENTBOX_WORKDIR=" + s.Workdir,
		"AGENTBOX_ATTEMPT=" + strconv.Itoa(attempt),
	}
}
