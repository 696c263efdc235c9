package images

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/images/layer"
	"github.com/agentbox/agentbox/internal/cptar/tree"
)

// stack lists what is mounted for an image of the layers infos, bottom first: these,
// top first, down to one that hides all below.
//
// A layer may hold a file without an entry for its directory, which then is as
// the layer below has it. But a layer is unpacked without those below, and
// overlayfs shows the upper of two directories. So where that matters, one more
// layer lies on top, of such directories only.
func (s *Store) stack(ctx context.Context, infos []layerInfo, pin *pin) ([]string, error) {
	var lower []string
	var dirs []string
	for _, info := range slices.Backward(infos) {
		lower = append(lower, info.DiffID)
		dirs = append(dirs, info.Implicit...)
		if info.Opaque {
			break
		}
	}
	if len(lower) == 1 {
		return lower, nil
	}
	slices.Sort(dirs)
	v := view{ctx: ctx, show: map[string]shown{}}
	defer v.close()
	for i, d := range lower {
		hex, _ := hexOf(d)
		f, err := os.Open(s.path("layers", hex, "diff"))
		if err != nil {
			return nil, err
		}
		v.layers = append(v.layers, f)
		implicit := map[string]bool{}
		for _, p := range infos[len(infos)-1-i].Implicit {
			implicit[p] = true
		}
		v.implicit = append(v.implicit, implicit)
	}
	for _, path := range slices.Compact(dirs) {
		if err := v.look(path); err != nil {
			return nil, err
		}
	}
	fix := v.fix()
	if len(fix) == 0 {
		return lower, nil
	}
	top, err := s.dirLayer(ctx, fix, pin)
	return append([]string{top}, lower...), err
}

// view is layers as overlayfs would show them, top first.
type view struct {
	ctx      context.Context
	layers   []*os.File
	implicit []map[string]bool
	show     map[string]shown
}

// shown is how a directory should look.
type shown struct {
	dir   tree.Dir
	first bool // it looks so already
	gone  bool // it is hidden, or no layer says how it looks
}

func (v *view) close() {
	for _, f := range v.layers {
		_ = f.Close() // only looked at
	}
}

// look finds how a directory and those above it should look.
func (v *view) look(path string) error {
	for p := path; ; p = parentOf(p) {
		if _, ok := v.show[p]; !ok {
			if err := v.one(p); err != nil {
				return err
			}
		}
		if p == "" {
			return nil
		}
	}
}

func parentOf(p string) string { return p[:max(0, strings.LastIndexByte(p, '/'))] }

func (v *view) one(path string) error {
	if err := v.ctx.Err(); err != nil {
		return err
	}
	first := true
	for i, top := range v.layers {
		d, state, err := tree.LookDir(top, path)
		if err != nil {
			return err
		}
		if state.There {
			if !v.implicit[i][path] {
				v.show[path] = shown{dir: d, first: first}
				return nil
			}
			first = false
		}
		if state.Hides {
			break
		}
	}
	v.show[path] = shown{gone: true}
	return nil
}

// fix lists the directories that have to lie on top, those above them too.
func (v *view) fix() map[string]tree.Dir {
	list := map[string]tree.Dir{}
	for path, s := range v.show {
		if s.gone || s.first {
			continue
		}
		for p := path; ; p = parentOf(p) {
			if a := v.show[p]; !a.gone {
				list[p] = a.dir
			} else {
				list[p] = tree.Dir{Mode: 0o755}
			}
			if p == "" {
				break
			}
		}
	}
	return list
}

// dirLayer makes a layer of directories only.
func (s *Store) dirLayer(ctx context.Context, dirs map[string]tree.Dir, pin *pin) (diffID string, err error) {
	tmp, hold, err := s.temp()
	if err != nil {
		return "", err
	}
	defer hold.Unlock()
	defer func() { err = errors.Join(err, os.RemoveAll(tmp)) }()
	if err := os.Mkdir(filepath.Join(tmp, "diff"), 0o755); err != nil {
		return "", err
	}
	diff, err := os.Open(filepath.Join(tmp, "diff"))
	if err != nil {
		return "", err
	}
	defer diff.Close()
	if err := tree.MakeDirs(diff, dirs); err != nil {
		return "", err
	}
	rep, err := layer.Seal(ctx, hold.File())
	if err != nil {
		return "", err
	}
	if err := writeInfo(tmp, layerInfo{DiffID: rep.DiffID, Entries: rep.Entries}); err != nil {
		return "", err
	}
	if err := unix.Syncfs(int(hold.File().Fd())); err != nil {
		return "", err
	}
	return rep.DiffID, s.locked(func() error { return errors.Join(pin.add(rep.DiffID), s.place(tmp, rep.DiffID)) })
}
