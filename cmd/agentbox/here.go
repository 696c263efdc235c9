package main

import (
	"context"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/runtime"
)

// A command in the directory of a workspace may leave SANDBOX out. It then means the sandbox that
// has a workspace over that directory.

// place is where a command stands in a sandbox.
type place struct {
	sandbox runtime.Sandbox
	dir     string // the current directory, as a path in the sandbox
}

// in returns the path in the sandbox of one that is relative to the current directory.
func (p place) in(name string) string {
	if path.IsAbs(name) {
		return path.Clean(name)
	}
	return path.Join(p.dir, name)
}

var headPattern = lazy.Regexp(`^HEAD(~[0-9]*)?$`)

// elided reports whether args leave SANDBOX out: there are none, or the first is a checkpoint,
// which is written @NAME or HEAD~N then.
func elided(args []string) bool {
	return len(args) == 0 || strings.HasPrefix(args[0], "@") || headPattern().MatchString(args[0])
}

// here finds the sandbox that has a workspace over the current directory. If there are several
// workspaces, the innermost directory counts.
func here(ctx context.Context, svc runtime.Service) (place, error) {
	dir, err := os.Getwd()
	if err == nil {
		dir, err = filepath.EvalSymlinks(dir)
	}
	if err != nil {
		return place{}, usageErrorf("SANDBOX is missing, and the current directory is unknown: %v", err)
	}
	all, err := svc.Sandboxes(ctx)
	if err != nil {
		return place{}, err
	}
	var found []place
	depth := 0
	for _, sb := range all {
		at, ok := workspaceOver(sb.Spec.Workspaces(), dir)
		if !ok || len(at.Source) < depth || sb.Labels[runtime.LabelValidates] != "" {
			continue
		}
		if len(at.Source) > depth {
			found, depth = nil, len(at.Source)
		}
		rest := strings.TrimPrefix(dir, at.Source)
		found = append(found, place{sandbox: sb, dir: path.Join(at.Target, rest)})
	}
	switch len(found) {
	case 0:
		return place{}, usageErrorf("SANDBOX is missing, and no sandbox has a workspace over %s; make one with: agentbox shell",
			oneLine(dir))
	case 1:
		return found[0], nil
	}
	var names []string
	for _, p := range found {
		names = append(names, p.sandbox.Name)
	}
	slices.Sort(names)
	return place{}, usageErrorf("SANDBOX is missing, and %d sandboxes have a workspace over %s: %s",
		len(names), oneLine(dir), clipNames(names))
}

// clipNames lists the first of many names.
func clipNames(names []string) string {
	const most = 8
	if len(names) > most {
		names = append(slices.Clone(names[:most]), fmt.Sprintf("and %d more", len(names)-most))
	}
	return strings.Join(names, ", ")
}

// workspaceOver returns the innermost workspace whose directory contains dir.
func workspaceOver(workspaces []runtime.Mount, dir string) (over runtime.Mount, ok bool) {
	for _, m := range workspaces {
		if fsx.Within(m.Source, dir) && (!ok || len(m.Source) > len(over.Source)) {
			over, ok = m, true
		}
	}
	return over, ok
}

// fromHere returns paths in the sandbox for those that are relative to the current directory.
func fromHere(ctx context.Context, names []string, svc runtime.Service) (list []string, err error) {
	if !slices.ContainsFunc(names, func(name string) bool { return !path.IsAbs(name) }) {
		return names, nil
	}
	p, err := here(ctx, svc)
	for _, name := range names {
		list = append(list, p.in(name))
	}
	return list, err
}

// stateHere completes SANDBOX[@CHECKPOINT] where SANDBOX is left out. in makes paths those in the sandbox:
// relative ones are of the current directory then, and of the root otherwise.
func stateHere(ctx context.Context, ref string, svc runtime.Service) (full string, in func(string) string, err error) {
	if !strings.HasPrefix(ref, "@") {
		return ref, rooted, nil
	}
	p, err := here(ctx, svc)
	return p.sandbox.Name + ref, p.in, err
}

// onSandbox calls fn with the sandbox that args begin with and the rest of them or, where they
// leave it out, with the one that has a workspace here.
func (a *app) onSandbox(
	ctx context.Context, args []string, fn func(svc runtime.Service, sandbox string, rest []string) error,
) error {
	if len(args) > 0 && args[0] == "" {
		return usageErrorf("SANDBOX is empty")
	}
	return a.service(ctx, func(svc runtime.Service) error {
		if !elided(args) {
			return fn(svc, args[0], args[1:])
		}
		p, err := here(ctx, svc)
		if err != nil {
			return err
		}
		return fn(svc, p.sandbox.Name, args)
	})
}
