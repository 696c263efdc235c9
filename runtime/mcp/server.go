package mcp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"sync"
	"time"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/agentbox/agentbox/runtime"
)

// Options say what an agent may do.
type Options struct {
	Sandbox         string // the one to act in; may be empty with Create
	Create          *CreateOptions
	ReadOnly        bool // only the tools that change nothing
	NoRestore       bool
	CheckpointEvery bool // before each call that may change something
	WholeSandbox    bool // file tools may leave the working directory
	Keep            bool // what the session made stays when it ends
	MaxSandboxes    int  // that the session may have made at a time; 0: 8
	// MaxCheckpoints and MaxCheckpointBytes bound what agents have taken of each
	// sandbox; the oldest go. 0: 100, and 20 GiB.
	MaxCheckpoints     int
	MaxCheckpointBytes int64
	Version            string
	Log                *slog.Logger // nil: none
}

// CreateOptions let the agent make sandboxes.
type CreateOptions struct {
	// Request returns the request for a sandbox of that image; its name, command and labels are
	// filled in.
	Request func(image string) (runtime.CreateRequest, error)
	// Images are those that may be used, the first when none is named; none:
	// all, and one must be named.
	Images []string
}

// cleanupTimeout bounds the end of a session.
const cleanupTimeout = 2 * time.Minute

// Server serves one session.
type Server struct {
	opts  Options
	svc   runtime.Local
	log   *slog.Logger
	sdk   *sdk.Server
	owner string // of what it makes; see leftovers
	jobs  jobs

	mu    sync.Mutex
	boxes []*box // that can be reached, the first made last; the first is the default if one was given
	given bool
	busy  int // sandboxes being made
}

// New makes the server of a session. Close ends it.
func New(ctx context.Context, svc runtime.Local, opts Options) (*Server, error) {
	if opts.Log == nil {
		opts.Log = slog.New(slog.DiscardHandler)
	}
	opts.MaxSandboxes = cmp.Or(opts.MaxSandboxes, 8)
	opts.MaxCheckpoints = cmp.Or(opts.MaxCheckpoints, 100)
	opts.MaxCheckpointBytes = cmp.Or(opts.MaxCheckpointBytes, 20<<30)
	s := &Server{opts: opts, svc: svc, log: opts.Log, owner: ownerNow()}
	s.jobs.init()
	attempt := 0
	switch {
	case opts.Sandbox != "":
		sb, err := svc.Sandbox(ctx, opts.Sandbox)
		if err != nil {
			return nil, err
		}
		attempt = sb.Attempt
		s.boxes, s.given = []*box{boxOf(sb, false)}, true
	case opts.Create == nil:
		return nil, fmt.Errorf("%w: neither a sandbox nor leave to make one", runtime.ErrInvalid)
	}
	if err := s.removeLeftovers(ctx); err != nil {
		s.log.Error("sandboxes of killed sessions not removed", "err", err)
	}
	s.sdk = sdk.NewServer(&sdk.Implementation{
		Name: "agentbox", Title: "Agentbox sandbox", Version: cmp.Or(opts.Version, "dev"),
	}, &sdk.ServerOptions{
		Instructions: s.instructions(attempt),
		Logger:       s.log,
		Capabilities: &sdk.ServerCapabilities{},
	})
	s.addTools()
	return s, nil
}

// ServeStream serves one client on a pair of streams until that closes its end
// or ctx ends, which is no error.
func (s *Server) ServeStream(ctx context.Context, r io.ReadCloser, w io.WriteCloser) error {
	err := s.sdk.Run(ctx, &sdk.IOTransport{Reader: r, Writer: w})
	if ctx.Err() != nil || errors.Is(err, io.EOF) {
		return nil
	}
	return err
}

// Close ends the session: its commands, and the sandboxes that it made, unless
// they are to be kept. It goes on after an error and returns the first one with
// all others behind it.
func (s *Server) Close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	s.stopJobs(ctx, nil)
	if s.opts.Keep {
		return nil
	}
	s.mu.Lock()
	boxes := s.boxes
	s.boxes = nil
	s.mu.Unlock()
	var errs []error
	for _, b := range boxes {
		if b.made {
			errs = append(errs, s.discard(ctx, b.id))
		}
	}
	return errors.Join(errs...)
}

// instructions returns what a client passes to its model about the server.
func (s *Server) instructions(attempt int) string {
	text := "Agentbox runs your commands and keeps your files in a sandbox of its own root filesystem, apart from the host. "
	if s.given {
		b := s.boxes[0]
		text += fmt.Sprintf("You are in sandbox %q; your working directory is %s. A path that is left out means %[2]s, and relative paths begin there. "+
			"No path of the host exists here: do not look for the project anywhere else. ", b.name, b.workdir)
		if attempt > 1 {
			text += fmt.Sprintf("This is attempt %d: earlier ones were taken back, so try another way than the obvious one. ", attempt)
		}
		text += "Every process has AGENTBOX_SANDBOX, AGENTBOX_WORKDIR and AGENTBOX_ATTEMPT in its environment. "
	} else {
		text += "Make a sandbox with create_sandbox first. A path that is left out means its working directory, which create_sandbox tells, and relative paths begin there. "
	}
	if !s.opts.WholeSandbox {
		text += "File tools stay in the working directory; run_command reaches the rest of the sandbox. "
	}
	switch {
	case s.opts.ReadOnly:
		text += "You can look, and change nothing."
	case s.opts.NoRestore:
		text += "Take a checkpoint before a risky step: your user can go back to it."
	default:
		text += "Take a checkpoint before a risky step; restore puts files and processes back exactly as they were."
	}
	if s.opts.CheckpointEvery && !s.opts.ReadOnly {
		text += " A checkpoint is taken by itself before each call that may change something."
	}
	return text
}
