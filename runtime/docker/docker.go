// Package docker is the backend on a Docker daemon of this machine.
//
// The daemon keeps everything that lasts: a sandbox of ours is a container
// whose labels carry the sandbox's id, its root and its spec, so a second
// process, a later version or a restarted daemon know as much as its maker.
// Adopt takes on any other container; its id as a sandbox is the first 32
// digits of the daemon's. Beside the daemon there is
//
//	ROOT/docker.lock              held while addresses and networks are given out
//	RUN/docker/<daemon's id>      how to reach a paused container without the daemon
//	STAGERUN/...                  what the OCI runtime is to do at the next start: package criu/stage
//	<container's directory>/agentbox.json   which files of /etc the last start kept as the sandbox had them
//
// Every call goes to the daemon's API. Five things do not, because the API
// has no word for them: the overlay's directories are used in place; where they
// are is asked of containerd, if the daemon keeps them there; a
// checkpoint is made by the real OCI runtime, found through the container's
// shim; the links of a container that has to vanish silently are taken down in
// its network namespace; and what is frozen is thawed by the OCI runtime when
// the daemon does not answer.
//
// Processes are restored by the daemon's ordinary start of a container whose
// runtime is agentbox-runtime. For others there is the daemon's own
// experimental restore, if it is on; see experimental.go.
package docker

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/docker/docker/api/types/system"
	"github.com/docker/docker/client"
	"go.opentelemetry.io/otel/trace/noop"

	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime"
)

// Options place a Backend. The zero value of every field but Root and Run works.
type Options struct {
	Host string // the daemon's address; default: DOCKER_HOST, or Docker's default
	Root string // agentbox's lasting state, e.g. /var/lib/agentbox
	Run  string // agentbox's transient state, e.g. /run/agentbox

	// Self is the agentbox binary that is run as `Self --root Root reap ID` when
	// an --rm sandbox has exited. Empty: nothing is.
	Self string
	// Runtime is the name under which agentbox-runtime is registered with the
	// daemon; default "agentbox".
	Runtime string
	// StageRun is where that runtime looks for staged restores. The daemon's
	// environment decides, not Run; default stage.Run().
	StageRun string
	Log      *slog.Logger
}

// Backend implements runtime.Backend and, by Images, runtime.Images. It holds
// nothing of containers that could not be looked up again.
type Backend struct {
	api       *client.Client
	host      string
	root, run string
	self      string
	runtime   string
	stageRun  string
	log       *slog.Logger

	mu    sync.Mutex
	ids   map[string]string // ours -> the daemon's
	facts *system.Info
}

var _ runtime.Backend = (*Backend)(nil)

// Labels of our containers and networks.
const (
	labelID    = "agentbox.sandbox"
	labelRoot  = "agentbox.root"
	labelSpec  = "agentbox.spec"
	labelGroup = "agentbox.group"
)

const (
	// callTimeout bounds a call to the daemon that must not be broken off
	// half-way: whether the daemon goes on with one is its own affair.
	callTimeout = 2 * time.Minute
	// grace bounds every wait for something that happens by itself within
	// moments.
	grace = 10 * time.Second
)

// Open makes a Backend. It asks the daemon nothing: a daemon that does not
// answer is the error of whatever needs it.
func Open(opts Options) (*Backend, error) {
	if opts.Root == "" || opts.Run == "" {
		return nil, fmt.Errorf("%w: docker backend without root or run directory", fault.ErrInvalid)
	}
	b := &Backend{
		host: opts.Host, self: opts.Self, runtime: opts.Runtime, stageRun: opts.StageRun, log: opts.Log,
		ids: map[string]string{},
	}
	if b.host == "" {
		b.host = os.Getenv(client.EnvOverrideHost)
	}
	if b.host == "" {
		b.host = client.DefaultDockerHost
	}
	if b.runtime == "" {
		b.runtime = "agentbox"
	}
	if b.stageRun == "" {
		b.stageRun = stage.Run()
	}
	if b.log == nil {
		b.log = slog.Default()
	}
	if !strings.HasPrefix(b.host, "unix://") {
		return nil, hint(fmt.Errorf("%w: the Docker daemon at %s", fault.ErrUnsupported, b.host),
			"agentbox works on the files and processes of a daemon of this machine: name its socket, as in DOCKER_HOST=unix:///var/run/docker.sock.")
	}
	var err error
	for _, dir := range []*string{&opts.Root, &opts.Run} {
		if *dir, err = filepath.Abs(*dir); err != nil {
			return nil, err
		}
	}
	if b.self != "" {
		if b.self, err = filepath.Abs(b.self); err != nil {
			return nil, err
		}
	}
	b.root, b.run = opts.Root, opts.Run
	if b.api, err = client.NewClientWithOpts(client.WithHost(b.host), client.WithVersionFromEnv(),
		client.WithAPIVersionNegotiation(), client.WithTraceProvider(noop.NewTracerProvider())); err != nil {
		return nil, fmt.Errorf("%w: %w", fault.ErrInvalid, err)
	}
	return b, nil
}

// Properties are this backend's differences.
func (b *Backend) Properties() runtime.Properties { return runtime.Properties{Name: "docker"} }

// info returns the daemon's description of itself, which is asked for once; fresh asks again.
func (b *Backend) info(ctx context.Context, fresh bool) (*system.Info, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.facts != nil && !fresh {
		return b.facts, nil
	}
	info, err := b.api.Info(ctx)
	if err != nil {
		return nil, b.explain(ctx, err)
	}
	b.facts = &info
	return b.facts, nil
}

// whole returns a context for a call that is finished once it has begun, even if ctx ends. The
// daemon may complete an interrupted call all the same.
func whole(ctx context.Context) (context.Context, context.CancelFunc) {
	return context.WithTimeout(context.WithoutCancel(ctx), callTimeout)
}

// hint is an error with a remedy.
func hint(err error, remedy string) error { return &fault.Error{Err: err, Hint: remedy} }
