package mcp

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/internal/proc"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/bundle"
)

// box is a sandbox that the session can reach.
type box struct {
	id, name, workdir, user string
	every                   policy.Every // its own checkpoints
	steps                   bool         // it takes one after each exec that has changed a file
	made                    bool         // by the session, which is its end
	ids                     *idmap.Map   // of its user namespace

	// files is held for writing while a checkpoint or a restore is at the
	// files, so that those find no file half written by a tool.
	files sync.RWMutex
	edits sync.Mutex // an edit reads before it writes
}

func boxOf(sb runtime.Sandbox, made bool) *box {
	workdir := sb.Spec.Workdir
	if workdir == "" {
		workdir = "/"
	}
	every, _ := policy.ParseEvery(sb.Spec.CheckpointEvery) // Create has judged it
	return &box{
		id: sb.ID, name: sb.Name, workdir: workdir, user: sb.Spec.User, every: every, steps: sb.Spec.TakesSteps(), made: made, ids: sb.Spec.IDs,
	}
}

// Target says which sandbox a call means.
type Target struct {
	Sandbox string `json:"sandbox,omitempty" jsonschema:"name of a sandbox that you have made or forked; omit it for the usual one"`
}

func (t Target) sandbox() string { return t.Sandbox }

// box finds the sandbox that a call means, among those of the session.
func (s *Server) box(ref string) (*box, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case ref != "":
		for _, b := range s.boxes {
			if b.name == ref || b.id == ref {
				return b, nil
			}
		}
		return nil, &runtime.Error{Op: "find", ID: ref, Err: fmt.Errorf("no such sandbox in this session: %w",
			runtime.ErrNotFound), Hint: "There are: " + s.names()}
	case s.given || len(s.boxes) == 1:
		return s.boxes[0], nil
	case len(s.boxes) == 0:
		return nil, &runtime.Error{
			Err: fmt.Errorf("%w: there is no sandbox yet", runtime.ErrState), Hint: "Make one with create_sandbox.",
		}
	}
	return nil, &runtime.Error{
		Err:  fmt.Errorf("%w: there are several sandboxes", runtime.ErrInvalid),
		Hint: "Name one as sandbox: " + s.names(),
	}
}

func (s *Server) names() string {
	names := []string{}
	for _, b := range s.boxes {
		names = append(names, b.name)
	}
	if len(names) == 0 {
		return "none."
	}
	return strings.Join(names, ", ") + "."
}

// files runs fn on a sandbox's files, kept in the working directory, with the
// rights of the sandbox's user.
func (s *Server) files(ctx context.Context, b *box, fn func(*policy.Scope) error) error {
	b.files.RLock()
	defer b.files.RUnlock()
	return s.svc.Files(ctx, b.id, func(jail *policy.Jail) error {
		root, err := jail.Handle("/", true)
		if err != nil {
			return err
		}
		defer root.Close()
		user, err := bundle.LookUser(root, b.user)
		if err != nil {
			return err
		}
		return as(user, b.ids, func() error {
			scope, err := jail.Scope(b.workdir, s.opts.WholeSandbox)
			if err != nil {
				return err
			}
			defer scope.Close()
			return fn(scope)
		})
	})
}

// reserve makes room for n sandboxes; done is called when they are made, or not.
func (s *Server) reserve(n int) (done func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	made := s.busy + n
	for _, b := range s.boxes {
		if b.made {
			made++
		}
	}
	if made > s.opts.MaxSandboxes {
		return nil, &runtime.Error{Err: fmt.Errorf("%w: a session may have made %d sandboxes at a time",
			runtime.ErrDenied, s.opts.MaxSandboxes), Hint: "Remove one with remove_sandbox."}
	}
	s.busy += n
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.busy -= n
	}, nil
}

func (s *Server) keepBox(sb runtime.Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.boxes = append(s.boxes, boxOf(sb, true))
}

type createArgs struct {
	Image string `json:"image,omitempty" jsonschema:"image to use; omit it for the default one"`
	Name  string `json:"name,omitempty" jsonschema:"name of the sandbox; omit it to have one made up"`
}

func (s *Server) createSandbox(ctx context.Context, in createArgs) (reply, error) {
	allowed := s.opts.Create.Images
	if in.Image == "" && len(allowed) > 0 {
		in.Image = allowed[0]
	}
	if in.Image == "" {
		return reply{}, fmt.Errorf("%w: name an image", runtime.ErrInvalid)
	}
	if len(allowed) > 0 && !slices.Contains(allowed, in.Image) {
		return reply{}, &runtime.Error{Op: "create", Err: fmt.Errorf("%w: the image %s may not be used here",
			runtime.ErrDenied, in.Image), Hint: "Use one of: " + strings.Join(allowed, ", ") + "."}
	}
	req, err := s.opts.Create.Request(in.Image)
	if err != nil {
		return reply{}, err
	}
	done, err := s.reserve(1)
	if err != nil {
		return reply{}, err
	}
	defer done()
	req.Spec.Name = in.Name
	if req.Spec.Name == "" {
		req.Spec.Name = "mcp-" + randomName()
	}
	// It lives until it is removed, and does nothing by itself.
	req.Entrypoint, req.Spec.Args, req.Spec.Init = []string{"sleep"}, []string{"2147483647"}, true
	req.Spec.Labels = s.label(req.Spec.Labels, req.Spec.Name)
	sb, err := s.svc.Create(ctx, req)
	if err != nil {
		return reply{}, err
	}
	if _, err := s.svc.Start(ctx, sb.ID, nil); err != nil {
		return reply{}, errors.Join(err, s.discard(context.WithoutCancel(ctx), sb.ID))
	}
	s.keepBox(sb)
	return reply{text: fmt.Sprintf("sandbox %s of image %s runs; its working directory is %s", sb.Name, sb.Image,
		boxOf(sb, true).workdir)}, nil
}

func (s *Server) listSandboxes(ctx context.Context, _ struct{}) (reply, error) {
	s.mu.Lock()
	boxes := slices.Clone(s.boxes)
	s.mu.Unlock()
	var text strings.Builder
	for _, b := range boxes {
		status := "removed"
		sb, err := s.svc.Sandbox(ctx, b.id)
		if err == nil {
			status = string(sb.Status)
		} else if !errors.Is(err, runtime.ErrNotFound) {
			return reply{}, err
		}
		how := "given"
		if b.made {
			how = "made in this session"
		}
		fmt.Fprintf(&text, "%s: %s, image %s, working directory %s, %s\n", b.name, status, sb.Image, b.workdir, how)
	}
	if len(boxes) == 0 {
		text.WriteString("There is no sandbox yet; make one with create_sandbox.\n")
	}
	return reply{text: text.String()}, nil
}

type removeArgs struct {
	Sandbox string `json:"sandbox" jsonschema:"name of a sandbox that you have made or forked"`
}

func (a removeArgs) sandbox() string { return a.Sandbox }

func (s *Server) removeSandbox(ctx context.Context, b *box, _ removeArgs) (reply, error) {
	if !b.made {
		return reply{}, &runtime.Error{
			Op: "remove", ID: b.name, Err: fmt.Errorf("%w: it was not made in this session", runtime.ErrDenied),
			Hint: "Only sandboxes of create_sandbox and fork can be removed.",
		}
	}
	s.stopJobs(ctx, b)
	if err := s.discard(ctx, b.id); err != nil {
		return reply{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.boxes = slices.DeleteFunc(s.boxes, func(other *box) bool { return other == b })
	return reply{text: "removed " + b.name + " and its checkpoints"}, nil
}

func (s *Server) discard(ctx context.Context, id string) error {
	err := s.svc.Remove(ctx, id, runtime.RemoveOptions{Force: true, Checkpoints: true})
	if errors.Is(err, runtime.ErrNotFound) {
		return nil
	}
	return err
}

// ownerLabel is on what a session makes. It holds the owner and the name, since a fork made
// elsewhere has the label too, but another name.
const ownerLabel = "agentbox.mcp"

func (s *Server) label(labels map[string]string, name string) map[string]string {
	out := map[string]string{}
	for k, v := range labels {
		out[k] = v
	}
	if !s.opts.Keep {
		out[ownerLabel] = s.owner + " " + name
	}
	return out
}

// removeLeftovers removes what sessions made that were killed before they could.
func (s *Server) removeLeftovers(ctx context.Context) error {
	all, err := s.svc.Sandboxes(ctx)
	if err != nil {
		return err
	}
	var errs []error
	for _, sb := range all {
		owner, name, ok := strings.Cut(sb.Labels[ownerLabel], " ")
		if !ok || name != sb.Name || ownerAlive(owner) {
			continue
		}
		s.log.Warn("sandbox of a killed session not removed", "sandbox", sb.Name)
		errs = append(errs, s.discard(ctx, sb.ID))
	}
	return errors.Join(errs...)
}

// ownerNow names this process among all that ever were on this host.
func ownerNow() string {
	boot, _ := os.ReadFile("/proc/sys/kernel/random/boot_id")
	return fmt.Sprintf("%s/%d/%s", strings.TrimSpace(string(boot)), os.Getpid(), startTicks(os.Getpid()))
}

func ownerAlive(owner string) bool {
	part, now := strings.Split(owner, "/"), strings.Split(ownerNow(), "/")
	if len(part) != len(now) {
		return true // not a label of ours
	}
	pid, err := strconv.Atoi(part[1])
	return err != nil || part[0] == now[0] && startTicks(pid) == part[2]
}

// startTicks returns the start time of a process, in the kernel's ticks, or "" if it does not exist.
func startTicks(pid int) string {
	p, err := proc.Read(pid)
	if err != nil {
		return ""
	}
	return strconv.FormatUint(p.Start, 10)
}

func randomName() string {
	var b [4]byte
	_, _ = rand.Read(b[:])
	return hex.EncodeToString(b[:])
}
