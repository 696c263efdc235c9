package server

import (
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api/wire"
	"github.com/agentbox/agentbox/runtime/doctor"
)

// Bounds of a page.
const (
	usualPage = 1000
	maxPage   = 10000
)

// page cuts what is asked for out of a list.
func page[T any](r *http.Request, items []T, key func(T) string) (wire.Page[T], error) {
	q := r.URL.Query()
	limit := usualPage
	if s := q.Get("limit"); s != "" {
		n, err := strconv.Atoi(s)
		if err != nil || n < 1 || n > maxPage {
			return wire.Page[T]{}, fmt.Errorf("%w: limit %.20q: a number from 1 to %d", runtime.ErrInvalid, s, maxPage)
		}
		limit = n
	}
	if s := q.Get("cursor"); s != "" {
		after, err := base64.RawURLEncoding.DecodeString(s)
		i := slices.IndexFunc(items, func(v T) bool { return key(v) == string(after) })
		if err != nil || i < 0 {
			return wire.Page[T]{}, fmt.Errorf("the cursor: what it stood at is %w any more: begin again",
				runtime.ErrNotFound)
		}
		items = items[i+1:]
	}
	p := wire.Page[T]{Items: items}
	if len(items) > limit {
		p.Items = items[:limit]
		p.Next = base64.RawURLEncoding.EncodeToString([]byte(key(items[limit-1])))
	}
	if p.Items == nil {
		p.Items = []T{}
	}
	return p, nil
}

// timeoutOf returns the time that a sandbox has to stop; negative: the usual one.
func timeoutOf(b wire.StopBody) time.Duration {
	if b.Timeout == nil {
		return -1
	}
	return *b.Timeout
}

func isSet(q url.Values, name string) bool {
	v, _ := strconv.ParseBool(q.Get(name)) // what is no bool is not true
	return v
}

func (h *Handler) routes() []route {
	return slices.Concat(h.sandboxRoutes(), h.fileRoutes(), h.checkpointRoutes(), h.effectRoutes(), h.storeRoutes(),
		h.imageRoutes(), h.leaseRoutes(), h.approvalRoutes(), h.healthRoutes())
}

func (h *Handler) sandboxRoutes() []route {
	svc := h.svc
	sandboxID := func(sb runtime.Sandbox) string { return sb.ID }
	return []route{
		query(h, "/v1/info", "Tell which service this is",
			func(context.Context, *request[wire.None]) (wire.Info, error) { return h.opts.Info, nil }),
		query(h, "/v1/ready", "Tell whether this host can checkpoint, and if not, why",
			func(ctx context.Context, _ *request[wire.None]) (doctor.Report, error) {
				return h.examine(ctx)
			}),
		query(h, "/v1/sandboxes", "List sandboxes, newest first, without the rules of policies and seccomp profiles",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Sandbox], error) {
				list, err := svc.Sandboxes(ctx)
				if err != nil {
					return wire.Page[runtime.Sandbox]{}, err
				}
				return page(r.Request, list, sandboxID)
			}, "limit", "cursor"),
		verb(h, "/v1/sandboxes", "Make a sandbox",
			func(ctx context.Context, r *request[wire.CreateBody]) (runtime.Sandbox, error) {
				if r.again() {
					list, err := svc.Sandboxes(ctx)
					for _, sb := range slices.Backward(list) { // forks have its labels, and are younger
						if sb.Labels[LabelRequest] == r.rec.Nonce {
							return svc.Sandbox(ctx, sb.ID)
						}
					}
					if err != nil {
						return runtime.Sandbox{}, r.unsettled(err)
					}
				}
				r.label(&r.in.Spec.Labels)
				if r.report != nil {
					r.in.Pull.Progress = func(p image.Progress) { r.report(p) }
				}
				if r.in.ToStart {
					// A caller that cannot be seen from here is not waited for.
					r.in.Caller = int(peerOf(r.Request).Pid)
					r.in.ToStart = r.in.Caller != 0
				}
				return svc.Create(r.in.WithSecrets(ctx), r.in.CreateRequest)
			}).heavily().withProgress(image.Progress{}),
		verb(h, "/v1/stats", "Tell what sandboxes use",
			func(ctx context.Context, r *request[runtime.StatsOptions]) ([]runtime.Stats, error) {
				return svc.Stats(ctx, r.in)
			}),
		query(h, "/v1/sandboxes/{sandbox}", "Describe a sandbox",
			func(ctx context.Context, r *request[wire.None]) (runtime.Sandbox, error) {
				return svc.Sandbox(ctx, r.ref)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/start", "Start a sandbox",
			func(ctx context.Context, r *request[wire.StartBody]) (wire.None, error) {
				_, err := svc.Start(r.in.WithSecrets(ctx), r.ref, nil)
				return h.stood(ctx, r.ref, r.again(), runtime.Running, err)
			}).heavily(),
		h.session("/v1/sandboxes/{sandbox}/start", "Start a sandbox with streams", h.startSession),
		h.session("/v1/sandboxes/{sandbox}/attach", "Connect to the first process", h.attachSession),
		h.session("/v1/sandboxes/{sandbox}/exec", "Run one more process with streams", h.execSession),
		verb(h, "/v1/sandboxes/{sandbox}/exec", "Run one more process without streams",
			func(ctx context.Context, r *request[runtime.Process]) (wire.ExitBody, error) {
				if err := unknown(r); err != nil {
					return wire.ExitBody{}, err
				}
				exit, err := svc.Exec(ctx, r.ref, r.in, runtime.Streams{})
				return wire.ExitBody{Exit: exit}, err
			}),
		query(h, "/v1/sandboxes/{sandbox}/wait", "Wait for the exit of the first process",
			func(ctx context.Context, r *request[wire.None]) (runtime.Exit, error) {
				ctx, cancel := h.untilDrained(ctx)
				defer cancel()
				return svc.Wait(ctx, r.ref)
			}),
		h.logs(),
		h.eventsRoute(),
		verb(h, "/v1/sandboxes/{sandbox}/kill", "Send a signal",
			func(ctx context.Context, r *request[wire.KillBody]) (wire.None, error) {
				if err := unknown(r); err != nil {
					return wire.None{}, err
				}
				return wire.None{}, svc.Kill(ctx, r.ref, r.in.Signal)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/stop", "Stop a sandbox",
			func(ctx context.Context, r *request[wire.StopBody]) (wire.None, error) {
				return wire.None{}, svc.Stop(ctx, r.ref, timeoutOf(r.in))
			}),
		verb(h, "/v1/sandboxes/{sandbox}/restart", "Stop a sandbox and start it again",
			func(ctx context.Context, r *request[wire.RestartBody]) (wire.None, error) {
				if err := unknown(r); err != nil {
					return wire.None{}, err
				}
				return wire.None{}, svc.Restart(r.in.WithSecrets(ctx), r.ref, timeoutOf(r.in.StopBody))
			}).heavily(),
		verb(h, "/v1/sandboxes/{sandbox}/pause", "Freeze every process",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return h.stood(ctx, r.ref, r.again(), runtime.Paused, svc.Pause(ctx, r.ref))
			}),
		verb(h, "/v1/sandboxes/{sandbox}/unpause", "Thaw every process",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return h.stood(ctx, r.ref, r.again(), runtime.Running, svc.Unpause(ctx, r.ref))
			}),
		verb(h, "/v1/sandboxes/{sandbox}/release", "Let a sandbox be used that a failed restore holds",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return noted(r, svc.ReleaseHold(ctx, r.ref), runtime.ErrState)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/remove", "Remove a sandbox",
			func(ctx context.Context, r *request[runtime.RemoveOptions]) (wire.None, error) {
				return noted(r, svc.Remove(ctx, r.ref, r.in), runtime.ErrNotFound)
			}).heavily(),
		verb(h, "/v1/sandboxes/{sandbox}/egress", "Change what a filtered sandbox may reach",
			func(ctx context.Context, r *request[runtime.EgressChange]) (wire.RulesBody, error) {
				rules, err := svc.UpdateEgress(ctx, r.ref, r.in)
				return wire.RulesBody{Rules: rules}, err
			}),
		verb(h, "/v1/sandboxes/{sandbox}/lifetime", "Change how long a sandbox may live",
			func(ctx context.Context, r *request[runtime.LifetimeChange]) (runtime.Sandbox, error) {
				return svc.UpdateLifetime(ctx, r.ref, r.in)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/storage", "Change what the files of a sandbox may take",
			func(ctx context.Context, r *request[runtime.StorageChange]) (runtime.Sandbox, error) {
				return svc.UpdateStorage(ctx, r.ref, r.in)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/apply", "Bring changes into the directory below, or take that back",
			func(ctx context.Context, r *request[runtime.ApplyOptions]) (runtime.Applied, error) {
				if err := unknown(r); err != nil {
					return runtime.Applied{}, err
				}
				return svc.Apply(ctx, r.ref, r.in)
			}).heavily(),
	}
}

// logs are always events: what is output and what is an error stay apart.
func (h *Handler) logs() route {
	return route{method: http.MethodGet, path: "/v1/sandboxes/{sandbox}/logs",
		summary: "Tell what the first process printed", query: []string{"follow", "tail", "since", "timestamps"},
		event: textType, serve: func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			opts := runtime.LogOptions{Follow: isSet(q, "follow"), Timestamps: isSet(q, "timestamps"), Tail: -1}
			if s := q.Get("tail"); s != "" {
				n, err := strconv.Atoi(s)
				if err != nil {
					writeProblem(w, fmt.Errorf("%w: tail %.20q", runtime.ErrInvalid, s))
					return
				}
				opts.Tail = n
			}
			var err error
			if opts.Since, err = since(q); err != nil {
				writeProblem(w, err)
				return
			}
			h.stream(w, r, func(ctx context.Context, e *events) error {
				return h.svc.Logs(ctx, ref(r), opts, output{e, wire.EventStdout}, output{e, wire.EventStderr})
			})
		}}
}

func (h *Handler) eventsRoute() route {
	return route{method: http.MethodGet, path: "/v1/sandboxes/{sandbox}/events", summary: "Tell what befell a sandbox",
		query: []string{"follow", "since", "type"}, event: eventType,
		serve: func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			at, err := since(q)
			if err != nil {
				writeProblem(w, err)
				return
			}
			opts := runtime.EventOptions{Follow: isSet(q, "follow"), Since: at, Types: q["type"]}
			h.stream(w, r, func(ctx context.Context, e *events) error {
				return h.svc.Events(ctx, ref(r), opts, func(ev runtime.Event) error {
					return e.send(wire.EventEvent, ev)
				})
			})
		}}
}

// maxFiles is how many files go into one event.
const maxFiles = 500

// files are always events: there may be very many.
func (h *Handler) files() route {
	return route{method: http.MethodGet, path: "/v1/sandboxes/{sandbox}/files",
		summary: "List a path, and what is in it", query: []string{"path", "recursive", "name", "file_type"},
		event: filesType, serve: func(w http.ResponseWriter, r *http.Request) {
			q := r.URL.Query()
			opts := runtime.ListOptions{Recursive: isSet(q, "recursive"), Name: q.Get("name"), Type: q.Get("file_type")}
			h.stream(w, r, func(ctx context.Context, e *events) error {
				var part wire.Files
				send := func() error {
					err := e.send(wire.EventFiles, part)
					part.Files = part.Files[:0]
					return err
				}
				err := h.svc.List(ctx, ref(r), q.Get("path"), opts, func(f runtime.FileEntry) error {
					if part.Files = append(part.Files, f); len(part.Files) < maxFiles {
						return nil
					}
					return send()
				})
				if len(part.Files) > 0 {
					// What was listed before an error is as true as ever.
					err = errors.Join(err, send())
				}
				return err
			})
		}}
}

// since is the time that a query asks for; zero: none.
func since(q url.Values) (time.Time, error) {
	s := q.Get("since")
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339Nano, s)
	if err != nil {
		return t, fmt.Errorf("%w: since %.50q is no RFC 3339 time", runtime.ErrInvalid, s)
	}
	return t, nil
}

func (h *Handler) fileRoutes() []route {
	svc := h.svc
	const archive = "/v1/sandboxes/{sandbox}/archive"
	return []route{
		h.download(archive, "Copy a path out, as a tar stream", tarStream,
			func(ctx context.Context, r *request[wire.None], w io.Writer) error {
				return svc.CopyFrom(ctx, r.ref, r.URL.Query().Get("path"), w)
			}, "path"),
		upload(h, http.MethodPut, archive, "Extract a tar stream into a directory", tarStream,
			func(ctx context.Context, r *request[wire.None], in io.Reader) (wire.None, error) {
				return wire.None{}, svc.CopyTo(ctx, r.ref, r.URL.Query().Get("path"), in)
			}, "path"),
		verb(h, "/v1/sandboxes/{sandbox}/mount",
			"Mount files of a checkpoint as long as the connection lasts; needs Accept: text/event-stream",
			func(ctx context.Context, r *request[wire.MountBody]) (wire.None, error) {
				if r.report == nil || r.rec != nil {
					return wire.None{}, fmt.Errorf("%w: a mount takes Accept: %s and no %s", runtime.ErrInvalid,
						wire.EventStream, wire.HeaderKey)
				}
				until, cancel := h.untilDrained(ctx)
				defer cancel()
				err := svc.Mount(until, r.ref, r.in.Dir, func(m runtime.Mounted) { r.report(m) })
				if err == nil && until.Err() != nil && ctx.Err() == nil {
					err = errEnding()
				}
				return wire.None{}, err
			}).withProgress(runtime.Mounted{}),
		query(h, "/v1/sandboxes/{sandbox}/stat", "Tell what a path is",
			func(ctx context.Context, r *request[wire.None]) (wire.Stat, error) {
				st, err := svc.Stat(ctx, r.ref, r.URL.Query().Get("path"))
				return wire.NewStat(st), err
			}, "path"),
		h.files(),
		h.download("/v1/checkpoints/{checkpoint}/export", "Write a checkpoint as one file", byteStream,
			func(ctx context.Context, r *request[wire.None], w io.Writer) error {
				q := r.URL.Query()
				return svc.ExportCheckpoint(ctx, r.ref, w, runtime.ExportOptions{
					Compress: q.Get("compress"), Recipients: q["recipient"],
				})
			}, "compress", "recipient").heavily(),
		upload(h, http.MethodPost, "/v1/checkpoints/import", "Read a checkpoint from one file", byteStream,
			func(ctx context.Context, r *request[wire.None], in io.Reader) (_ runtime.Checkpoint, err error) {
				q := r.URL.Query()
				opts := runtime.ImportOptions{Name: q.Get("name"), Image: q.Get("image"), Trust: isSet(q, "trust")}
				path, done, err := identities(r.Request)
				if err != nil {
					return runtime.Checkpoint{}, err
				}
				defer func() { err = errors.Join(err, done()) }()
				opts.Identities = path
				return svc.ImportCheckpoint(ctx, in, opts)
			}, "name", "image", "trust").heavily(),
		upload(h, http.MethodPost, "/v1/images/import", "Make an image of a tar stream of a root filesystem", tarStream,
			func(ctx context.Context, r *request[wire.None], in io.Reader) (runtime.Image, error) {
				return svc.ImportImageFrom(ctx, r.URL.Query().Get("name"), in)
			}, "name").heavily(),
	}
}

func (h *Handler) checkpointRoutes() []route {
	svc := h.svc
	checkpointID := func(c runtime.Checkpoint) string { return c.ID }
	return []route{
		verb(h, "/v1/sandboxes/{sandbox}/checkpoints", "Take a checkpoint",
			func(ctx context.Context, r *request[runtime.CheckpointOptions]) (runtime.Checkpoint, error) {
				if r.again() {
					list, err := svc.Checkpoints(ctx, runtime.CheckpointFilter{
						Sandbox: r.ref, Labels: map[string]string{LabelRequest: r.rec.Nonce},
					})
					if len(list) > 0 {
						return list[len(list)-1], nil
					}
					if err != nil && !errors.Is(err, runtime.ErrNotFound) {
						return runtime.Checkpoint{}, r.unsettled(err)
					}
				}
				r.label(&r.in.Labels)
				r.in.Progress = stepped(r)
				c, err := svc.Checkpoint(ctx, r.ref, r.in)
				if err == nil && !c.Reused {
					h.opts.Metrics.checkpointed(c)
				}
				return c, err
			}).heavily().withProgress(runtime.Step{}),
		verb(h, "/v1/sandboxes/{sandbox}/restore", "Put a sandbox back to a checkpoint",
			func(ctx context.Context, r *request[wire.RestoreBody]) (runtime.Restored, error) {
				if r.in.Undo { // done twice it is undone
					if err := unknown(r); err != nil {
						return runtime.Restored{}, err
					}
				}
				if r.report != nil {
					r.in.Pull.Progress = func(p image.Progress) { r.report(p) }
					r.in.Progress = stepped(r)
				}
				out, err := svc.Restore(r.in.WithSecrets(ctx), r.ref, r.in.RestoreOptions)
				if err == nil {
					h.opts.Metrics.restored(out)
				}
				return out, err
			}).heavily().withProgress(wire.RestoreProgress{}),
		verb(h, "/v1/sandboxes/{sandbox}/plan", "Tell what a restore would change",
			func(ctx context.Context, r *request[runtime.RestoreOptions]) (runtime.RestorePlan, error) {
				return svc.PlanRestore(ctx, r.ref, r.in)
			}).heavily(),
		verb(h, "/v1/sandboxes/{sandbox}/undo", "Go back in a sandbox's history by steps",
			func(ctx context.Context, r *request[runtime.UndoOptions]) (runtime.Restored, error) {
				return stepping(ctx, h, r, svc.Undo)
			}).heavily().withProgress(runtime.Step{}),
		verb(h, "/v1/sandboxes/{sandbox}/redo", "Go forward again to what undo has left",
			func(ctx context.Context, r *request[runtime.UndoOptions]) (runtime.Restored, error) {
				return stepping(ctx, h, r, svc.Redo)
			}).heavily().withProgress(runtime.Step{}),
		verb(h, "/v1/sandboxes/{sandbox}/undo/plan", "Tell what undo, or redo, would change",
			func(ctx context.Context, r *request[runtime.UndoOptions]) (runtime.RestorePlan, error) {
				return svc.PlanUndo(ctx, r.ref, r.in)
			}).heavily(),
		query(h, "/v1/sandboxes/{sandbox}/undo/list", "List where undo and redo lead",
			func(ctx context.Context, r *request[wire.None]) (runtime.UndoList, error) {
				return svc.UndoList(ctx, r.ref)
			}),
		verb(h, "/v1/sandboxes/{sandbox}/fork", "Start new sandboxes from a checkpoint",
			func(ctx context.Context, r *request[wire.ForkBody]) ([]runtime.Forked, error) {
				if err := unknown(r); err != nil {
					return nil, err
				}
				r.label(&r.in.Labels)
				r.in.Progress = stepped(r)
				forks, err := svc.Fork(r.in.WithSecrets(ctx), r.ref, r.in.ForkOptions)
				if len(forks) > 0 { // some were made, and stay
					err = r.unsettled(err)
				}
				return forks, err
			}).heavily().withProgress(runtime.Step{}),
		query(h, "/v1/sandboxes/{sandbox}/history", "List a sandbox's checkpoints with how they descend, newest first",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.HistoryEntry], error) {
				list, err := svc.History(ctx, r.ref, runtime.HistoryOptions{All: isSet(r.URL.Query(), "all")})
				if err != nil {
					return wire.Page[runtime.HistoryEntry]{}, err
				}
				return page(r.Request, list, func(e runtime.HistoryEntry) string { return e.ID })
			}, "all", "limit", "cursor"),
		verb(h, "/v1/diff", "Tell what differs between two states of a sandbox's files",
			func(ctx context.Context, r *request[runtime.DiffRequest]) (runtime.Diff, error) {
				return svc.Diff(ctx, r.in)
			}).heavily(),
		query(h, "/v1/checkpoints", "List checkpoints",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Checkpoint], error) {
				q := r.URL.Query()
				f := runtime.CheckpointFilter{
					Sandbox: q.Get("sandbox"), All: isSet(q, "all"), Trigger: q.Get("trigger"), Policy: q.Get("policy"),
				}
				for _, l := range q["label"] {
					k, v, _ := strings.Cut(l, "=")
					if f.Labels == nil {
						f.Labels = map[string]string{}
					}
					f.Labels[k] = v
				}
				list, err := svc.Checkpoints(ctx, f)
				if err != nil {
					return wire.Page[runtime.Checkpoint]{}, err
				}
				return page(r.Request, list, checkpointID)
			}, "sandbox", "all", "trigger", "policy", "label", "limit", "cursor"),
		query(h, "/v1/checkpoints/{checkpoint}", "Describe a checkpoint",
			func(ctx context.Context, r *request[wire.None]) (runtime.Checkpoint, error) {
				return svc.CheckpointInfo(ctx, r.ref)
			}),
		verb(h, "/v1/checkpoints/{checkpoint}/remove", "Remove a checkpoint",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return noted(r, svc.RemoveCheckpoint(ctx, r.ref), runtime.ErrNotFound)
			}),
		verb(h, "/v1/checkpoints/remove", "Remove the checkpoints that match a filter, in every state",
			func(ctx context.Context, r *request[runtime.CheckpointFilter]) (runtime.RemovedCheckpoints, error) {
				return svc.RemoveCheckpoints(ctx, r.in)
			}),
		verb(h, "/v1/checkpoints/{checkpoint}/verify", "Read all of a checkpoint again",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return wire.None{}, svc.VerifyCheckpoint(ctx, r.ref)
			}).heavily(),
		verb(h, "/v1/checkpoints/{checkpoint}/pin", "Keep a checkpoint from prune, or give it up",
			func(ctx context.Context, r *request[wire.PinBody]) (wire.None, error) {
				return wire.None{}, svc.PinCheckpoint(ctx, r.ref, r.in.Pinned)
			}),
		verb(h, "/v1/checkpoints/{checkpoint}/tag", "Give a checkpoint one more name",
			func(ctx context.Context, r *request[wire.TagBody]) (wire.None, error) {
				return wire.None{}, svc.TagCheckpoint(ctx, r.ref, r.in.Tag)
			}),
		verb(h, "/v1/checkpoints/{checkpoint}/untag", "Take the tag of SANDBOX@TAG away",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return noted(r, svc.UntagCheckpoint(ctx, r.ref), runtime.ErrNotFound)
			}),
		verb(h, "/v1/checkpoints/{checkpoint}/push", "Store a checkpoint in a registry",
			func(ctx context.Context, r *request[wire.RegistryBody]) (runtime.Pushed, error) {
				r.in.Options.Progress = counted(r)
				return svc.PushCheckpoint(ctx, r.ref, r.in.Reference, r.in.Options)
			}).heavily().withProgress(wire.Progress{}),
		verb(h, "/v1/checkpoints/pull", "Bring a checkpoint from a registry",
			func(ctx context.Context, r *request[wire.RegistryBody]) (runtime.Checkpoint, error) {
				r.in.Options.Progress = counted(r)
				return svc.PullCheckpoint(ctx, r.in.Reference, r.in.Options)
			}).heavily().withProgress(wire.Progress{}),
	}
}

// counted returns the callback for a verb's progress, or nil if it was not requested.
func counted[I any](r *request[I]) runtime.Progress {
	if r.report == nil {
		return nil
	}
	return func(done, total int64) { r.report(wire.Progress{Done: done, Total: total}) }
}

// stepped is counted for a verb of several phases.
func stepped[I any](r *request[I]) runtime.Steps {
	if r.report == nil {
		return nil
	}
	return func(s runtime.Step) { r.report(s) }
}

func (h *Handler) storeRoutes() []route {
	svc := h.svc
	return []route{
		verb(h, "/v1/prune", "Remove the checkpoints that no rule keeps, and free space",
			func(ctx context.Context, r *request[runtime.PruneOptions]) (runtime.Pruned, error) {
				r.in.Progress = counted(r)
				return svc.Prune(ctx, r.in)
			}).heavily().withProgress(wire.Progress{}),
		query(h, "/v1/policies", "List the policies that names stand for",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.PolicyEntry], error) {
				list, err := svc.Policies(ctx)
				if err != nil {
					return wire.Page[runtime.PolicyEntry]{}, err
				}
				return page(r.Request, list, func(e runtime.PolicyEntry) string { return e.Name })
			}, "limit", "cursor"),
		query(h, "/v1/policies/{policy}", "Tell what a policy says, with all that it inherits",
			func(ctx context.Context, r *request[wire.None]) (*policy.Policy, error) {
				return svc.Policy(ctx, r.PathValue("policy"))
			}),
		query(h, "/v1/usage", "Tell what space is used for",
			func(ctx context.Context, _ *request[wire.None]) (runtime.Usage, error) {
				return svc.Usage(ctx)
			}),
		verb(h, "/v1/verify", "Prove that checkpoints can be restored whole",
			func(ctx context.Context, r *request[runtime.VerifyOptions]) (runtime.VerifyReport, error) {
				r.in.Progress = counted(r)
				return svc.Verify(ctx, r.in)
			}).heavily().withProgress(wire.Progress{}),
		verb(h, "/v1/reindex", "Rebuild the index of the store",
			func(ctx context.Context, _ *request[wire.None]) (runtime.Reindexed, error) {
				return svc.Reindex(ctx)
			}).heavily(),
		verb(h, "/v1/recover", "Finish or undo what was interrupted, and compare what is recorded with what there is",
			func(ctx context.Context, _ *request[wire.None]) (runtime.ReconcileReport, error) {
				return svc.Reconcile(ctx)
			}).heavily(),
	}
}

func (h *Handler) imageRoutes() []route {
	svc := h.svc
	pushed := func(report func(any)) func(image.SourceProgress) {
		if report == nil {
			return nil
		}
		return func(p image.SourceProgress) { report(p) }
	}
	return []route{
		query(h, "/v1/images", "List images",
			func(ctx context.Context, r *request[wire.None]) (wire.Page[runtime.Image], error) {
				list, err := svc.Images(ctx)
				if err != nil {
					return wire.Page[runtime.Image]{}, err
				}
				return page(r.Request, list, func(im runtime.Image) string { return im.Name + "\n" + im.Digest })
			}, "limit", "cursor"),
		query(h, "/v1/images/{image}", "Describe an image",
			func(ctx context.Context, r *request[wire.None]) (runtime.ImageDetails, error) {
				return svc.InspectImage(ctx, r.ref)
			}),
		verb(h, "/v1/images/pull", "Get an image",
			func(ctx context.Context, r *request[wire.PullBody]) (runtime.Image, error) {
				if r.report != nil {
					r.in.Options.Progress = func(p image.Progress) { r.report(p) }
				}
				return svc.PullImage(ctx, r.in.Reference, r.in.Options)
			}).heavily().withProgress(image.Progress{}),
		verb(h, "/v1/images/prune", "Remove images that nothing needs",
			func(ctx context.Context, r *request[wire.AllBody]) (runtime.PrunedImages, error) {
				return svc.PruneImages(ctx, r.in.All)
			}).heavily(),
		verb(h, "/v1/images/{image}/push", "Write an image to a registry",
			func(ctx context.Context, r *request[wire.PushBody]) (runtime.PushedImage, error) {
				r.in.Options.Progress = pushed(r.report)
				return svc.PushImage(ctx, r.ref, r.in.To, r.in.Options)
			}).heavily().withProgress(image.SourceProgress{}),
		verb(h, "/v1/images/{image}/tag", "Give an image one more name",
			func(ctx context.Context, r *request[wire.NameBody]) (wire.None, error) {
				return wire.None{}, svc.TagImage(ctx, r.ref, r.in.Name)
			}),
		verb(h, "/v1/images/{image}/remove", "Remove a name of an image",
			func(ctx context.Context, r *request[wire.None]) (wire.None, error) {
				return noted(r, svc.RemoveImage(ctx, r.ref), runtime.ErrNotFound)
			}),
		verb(h, "/v1/images/{image}/verify", "Read an image's files again",
			func(ctx context.Context, r *request[wire.None]) (runtime.Image, error) {
				return svc.VerifyImage(ctx, r.ref)
			}).heavily(),
		verb(h, "/v1/commit", "Make an image of a sandbox or a checkpoint",
			func(ctx context.Context, r *request[wire.CommitBody]) (runtime.Committed, error) {
				r.in.Options.Source.Progress = pushed(r.report)
				return svc.Commit(ctx, r.in.Ref, r.in.To, r.in.Options)
			}).heavily().withProgress(image.SourceProgress{}),
	}
}

var (
	textType  = reflect.TypeFor[wire.Text]()
	eventType = reflect.TypeFor[runtime.Event]()
	filesType = reflect.TypeFor[wire.Files]()
)
