package engine

import (
	"context"
	"errors"
	"fmt"
	"io"

	"github.com/agentbox/agentbox/internal/cptar"
	"github.com/agentbox/agentbox/internal/idmap"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// onRoot runs fn on a sandbox's root filesystem.
func (bx *sandboxes) onRoot(
	ctx context.Context, ref string, write bool, fn func(root string, ids *idmap.Map) error,
) error {
	sb, err := bx.locate(ctx, ref)
	if err == nil && write {
		err = mayUse(sb.Sandbox)
	}
	if err != nil {
		return fail("cp", ref, err)
	}
	ids, err := ids(sb.Sandbox)
	if err != nil {
		return fail("cp", ref, err)
	}
	return fail("cp", ref, sb.host.Mount(ctx, sb.ID, func(root string) error { return fn(root, ids) }))
}

// CopyFrom writes a path of the sandbox as a tar stream.
func (v sandboxVerbs) CopyFrom(ctx context.Context, ref, path string, w io.Writer) error {
	return v.e.verb(ctx, errorsNamed(reads(onState("cp", ref))), func(ctx context.Context) error {
		if recorded, ok := splitState(ref); ok {
			return fail("cp", ref, v.e.checkpoints.copyFrom(ctx, recorded, path, w))
		}
		return v.e.sandboxes.onRoot(ctx, ref, false, func(root string, ids *idmap.Map) error {
			return cptar.From(ctx, root, ids, path, w)
		})
	})
}

// List lists a path of the sandbox, and what is in it.
func (v sandboxVerbs) List(
	ctx context.Context, ref, path string, opts runtime.ListOptions, fn func(runtime.FileEntry) error,
) error {
	return v.e.verb(ctx, errorsNamed(reads(onState("ls", ref))), func(ctx context.Context) error {
		only, err := filter(opts, fn)
		if err != nil {
			return fail("ls", ref, err)
		}
		if recorded, ok := splitState(ref); ok {
			return fail("ls", ref, v.e.checkpoints.list(ctx, recorded, path, opts.Recursive, only))
		}
		return v.e.sandboxes.onRoot(ctx, ref, false, func(root string, ids *idmap.Map) error {
			return cptar.List(ctx, root, ids, path, opts.Recursive, func(f cptar.Listed) error {
				return only(entryOf(f))
			})
		})
	})
}

// CopyTo extracts a tar stream into a directory of the sandbox.
func (v sandboxVerbs) CopyTo(ctx context.Context, ref, path string, r io.Reader) error {
	op := onSandbox("cp", ref)
	op.To, op.ErrorsNamed = path, true
	return v.e.verb(ctx, op, func(ctx context.Context) error {
		if _, ok := splitState(ref); ok {
			return fail("cp", ref, hint(fmt.Errorf("%w: a checkpoint cannot be changed", runtime.ErrInvalid),
				"Copy into the sandbox, or fork the checkpoint and copy into the fork."))
		}
		return v.e.sandboxes.onRoot(ctx, ref, true, func(root string, ids *idmap.Map) error {
			return cptar.To(ctx, root, ids, path, r)
		})
	})
}

// Files runs fn on the sandbox's root filesystem.
func (e *Engine) Files(ctx context.Context, ref string, fn func(*policy.Jail) error) error {
	return e.verb(ctx, &runtime.Op{
		Verb: "files", Ref: ref, About: runtime.AboutSandbox, Reads: runtime.OnlyReads(ctx), ErrorsNamed: true,
	}, func(ctx context.Context) error {
		return e.sandboxes.files(ctx, ref, fn)
	})
}

func (bx *sandboxes) files(ctx context.Context, ref string, fn func(*policy.Jail) error) error {
	sb, err := bx.locate(ctx, ref)
	if err == nil {
		err = mayUse(sb.Sandbox)
	}
	if err != nil {
		return fail("open", ref, err)
	}
	// Return errors of fn as they are.
	var own error
	err = sb.host.Mount(ctx, sb.ID, func(root string) error {
		jail, err := policy.Open(root)
		if err != nil {
			return err
		}
		defer jail.Close()
		own = fn(jail)
		return nil
	})
	return errors.Join(own, fail("open", ref, err))
}

// Stat describes a path in the sandbox.
func (v sandboxVerbs) Stat(ctx context.Context, ref, path string) (runtime.PathStat, error) {
	return verb(ctx, v.e, errorsNamed(reads(onState("stat", ref))),
		func(ctx context.Context) (out runtime.PathStat, err error) {
			if recorded, ok := splitState(ref); ok {
				out, err = v.e.checkpoints.stat(ctx, recorded, path)
				return out, fail("stat", ref, err)
			}
			err = v.e.sandboxes.onRoot(ctx, ref, false, func(root string, _ *idmap.Map) error {
				st, err := cptar.StatPath(root, path)
				out = runtime.PathStat(st)
				return err
			})
			return out, err
		})
}
