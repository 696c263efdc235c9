package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/agentbox/agentbox/criu/cut"
	"github.com/agentbox/agentbox/criu/stage"
	"github.com/agentbox/agentbox/internal/fsx"
)

// criuConfig is the annotation from which runc and crun take CRIU's configuration file.
const criuConfig = "org.criu.config"

// changes are made to a bundle before it is used.
type changes struct {
	env     []string // variables of its process
	config  string   // CRIU's configuration file; empty: what is named already
	cut     bool     // a hook of link.go
	standIn []string // the hook of standin.go, if the bundle's network namespace is a new one; nil: none
	resolve bool     // sources of bind mounts that are symlinks
}

// edit makes changes to a bundle. All else in its config.json keeps its meaning:
// what is not to be changed is never decoded.
func edit(bundle string, to changes) error {
	if len(to.env) == 0 && to.config == "" && !to.cut && to.standIn == nil && !to.resolve {
		return nil
	}
	path := filepath.Join(bundle, "config.json")
	data, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	spec := object{}
	if err := json.Unmarshal(data, &spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if len(to.env) > 0 {
		err = spec.within("process", func(process object) (err error) {
			process["env"], err = withEnv(process["env"], to.env)
			return err
		})
	}
	if err == nil && to.config != "" {
		err = spec.within("annotations", func(annotations object) (err error) {
			annotations[criuConfig], err = marshal(to.config)
			return err
		})
	}
	var before, after [][]string
	own := newNetwork(spec["linux"])
	switch {
	case to.cut && own && cut.Possible():
		before = append(before, []string{cutVerb})
	case to.cut:
		after = append(after, []string{downVerb})
	}
	if to.standIn != nil && own {
		after = append(after, append([]string{standInVerb}, to.standIn...))
	}
	if err == nil && len(before)+len(after) > 0 {
		err = spec.within("hooks", func(hooks object) error { return withHooks(hooks, before, after) })
	}
	if raw, ok := spec["mounts"]; ok && err == nil && to.resolve {
		spec["mounts"], err = resolved(raw)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	if data, err = marshal(spec); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return replace(path, data)
}

// object is a JSON object whose members are kept as they are written.
type object map[string]json.RawMessage

func (o object) within(name string, change func(object) error) error {
	inner := object{}
	if raw, ok := o[name]; ok {
		if err := json.Unmarshal(raw, &inner); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if inner == nil { // it said null
			inner = object{}
		}
	}
	err := change(inner)
	if err == nil {
		o[name], err = marshal(inner)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// resolved names what sources of bind mounts lead to if they are symlinks:
// where the runtime follows one when it creates, CRIU mounts the link itself
// and fails.
func resolved(raw json.RawMessage) (json.RawMessage, error) {
	var mounts []object
	if err := json.Unmarshal(raw, &mounts); err != nil {
		return nil, fmt.Errorf("mounts: %w", err)
	}
	changed := false
	for _, m := range mounts {
		var source string
		if json.Unmarshal(m["source"], &source) != nil || !filepath.IsAbs(source) {
			continue // not from a path
		}
		if st, err := os.Lstat(source); err != nil || st.Mode()&fs.ModeSymlink == 0 {
			continue
		}
		real, err := filepath.EvalSymlinks(source)
		if err == nil {
			m["source"], err = marshal(real)
		}
		if err != nil {
			return nil, fmt.Errorf("mounts: %w", err)
		}
		changed = true
	}
	if !changed {
		return raw, nil
	}
	return marshal(mounts)
}

// withEnv returns the environment raw with the variables set. Entries that
// stay keep their bytes, which need not be UTF-8.
func withEnv(raw json.RawMessage, set []string) (json.RawMessage, error) {
	var have []json.RawMessage
	if raw != nil {
		if err := json.Unmarshal(raw, &have); err != nil {
			return nil, fmt.Errorf("env: %w", err)
		}
	}
	value := map[string]string{} // of names not yet set
	for _, kv := range set {
		name, _, _ := strings.Cut(kv, "=")
		value[name] = kv
	}
	var env []json.RawMessage
	put := func(kv string) error {
		entry, err := marshal(kv)
		env = append(env, entry)
		return err
	}
	done := map[string]bool{}
	for _, entry := range have {
		var kv string
		if err := json.Unmarshal(entry, &kv); err != nil {
			return nil, fmt.Errorf("env: %w", err)
		}
		name, _, _ := strings.Cut(kv, "=")
		to, ok := value[name]
		switch {
		case !ok:
			env = append(env, entry)
		case !done[name]: // a second one would win in some programs
			done[name] = true
			if err := put(to); err != nil {
				return nil, err
			}
		}
	}
	for _, kv := range set {
		name, _, _ := strings.Cut(kv, "=")
		if !done[name] {
			done[name] = true
			if err := put(value[name]); err != nil {
				return nil, err
			}
		}
	}
	return marshal(env)
}

// marshal is json.Marshal that leaves <, > and & as they are.
func marshal(v any) (json.RawMessage, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// replace publishes data in place of a file, whose owner and mode it keeps.
func replace(path string, data []byte) error {
	st, err := os.Stat(path)
	if err != nil {
		return err
	}
	// Not fsynced: no engine goes on with a bundle after a power cut.
	return fsx.Write(path, data, fsx.Options{Like: st, Volatile: true})
}

// overwrite gives a file its content, owner and mode without replacing it: the
// bundle may name it as the source of a bind mount that is already made. A
// file that is missing is made.
func overwrite(want stage.File) (err error) {
	// A link in its place could be the container's doing. Not blocking,
	// because so could a named pipe.
	f, err := os.OpenFile(want.Path, os.O_RDWR|os.O_CREATE|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	st, err := f.Stat()
	if err != nil {
		return err
	}
	if !st.Mode().IsRegular() {
		return fmt.Errorf("%s is not a regular file", want.Path)
	}
	have, err := io.ReadAll(io.LimitReader(f, int64(len(want.Data))+1))
	if err != nil {
		return err
	}
	if !bytes.Equal(have, want.Data) {
		if err := f.Truncate(0); err != nil {
			return err
		}
		if _, err := f.WriteAt(want.Data, 0); err != nil {
			return err
		}
	}
	if err := f.Chown(int(want.UID), int(want.GID)); err != nil {
		return err
	}
	// After the change of owner, which clears bits; and not f.Chmod, which
	// takes another notation of them.
	return syscall.Fchmod(int(f.Fd()), want.Mode)
}
