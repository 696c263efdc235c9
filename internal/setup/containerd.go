package setup

import (
	"context"
	"errors"
	"fmt"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// ContainerdConfig is where containerd looks for its configuration.
const ContainerdConfig = "/etc/containerd/config.toml"

const runcShim = "io.containerd.runc.v2"

// criTables are where the handlers of Kubernetes stand, by the version that
// the file declares.
var criTables = map[int64][]string{
	2: {"plugins", "io.containerd.grpc.v1.cri", "containerd", "runtimes"},
	3: {"plugins", "io.containerd.cri.v1.runtime", "containerd", "runtimes"},
}

// ContainerdOptions say how to set containerd up.
type ContainerdOptions struct {
	Options
	Restart bool // restart containerd through systemd; containers go on
}

// Containerd adds a CRI runtime handler to containerd's configuration.
// containerd reads it only at its start.
func Containerd(ctx context.Context, opts ContainerdOptions) (Result, error) {
	var r Result
	var err error
	if opts.Options, r, err = opts.resolve("containerd", ContainerdConfig); err != nil {
		return r, err
	}
	if opts.Restart && !haveSystemd() {
		return r, fmt.Errorf("--restart needs systemd, which does not run here: %w", fault.ErrUnsupported)
	}
	edit := tomlEdit{
		opts: opts.Options, result: &r,
		add:    func(doc []byte, path string) ([]byte, error) { return addHandler(doc, opts.Name, path) },
		remove: func(doc []byte) ([]byte, error) { return removeHandler(doc, opts.Name) },
		validate: func(path string) (bool, error) {
			return validateContainerd(ctx, path)
		},
		path: func(tree map[string]any) string {
			table, _ := handlers(tree)
			path, _ := lookup(tree, append(slices.Clone(table), opts.Name, "options", "BinaryName")...)
			s, _ := path.(string)
			return s
		},
		empty: func(doc []byte) bool { return strings.TrimSpace(string(doc)) == "version = 2" },
	}
	if err := edit.run(); err != nil {
		return r, err
	}
	if tree, err := decodeTOML(edit.data); err == nil && !opts.Remove {
		disabled, _ := lookup(tree, "disabled_plugins")
		if list, _ := disabled.([]any); slices.ContainsFunc(list, isCRI) {
			r.note("%s disables the CRI plugin (disabled_plugins), and with it all handlers", edit.file.path)
		}
	}
	if !opts.Remove {
		r.note("without Kubernetes nothing needs to be configured: `ctr run --runc-binary %s` and agentbox's own containerd backend name the runtime themselves", opts.Runtime)
	}
	if !r.Changed || opts.DryRun {
		return r, nil
	}
	if !opts.Restart {
		r.note("containerd reads its configuration when it starts; containers outlive its restart: systemctl restart containerd")
		return r, nil
	}
	if out, err := command(ctx, "systemctl", "restart", "containerd.service").CombinedOutput(); err != nil {
		return r, edit.putBack(fmt.Errorf("restart containerd: %w: %s", err, lastLine(out)))
	}
	r.Reloaded = true
	return r, nil
}

// isCRI reports whether a plugin is the one that serves Kubernetes: all of it,
// or, from 2.0 on, the part that has the handlers.
func isCRI(plugin any) bool {
	return plugin == any("io.containerd.grpc.v1.cri") || plugin == any("io.containerd.cri.v1.runtime")
}

// handlers tells where runtime handlers stand in the document.
func handlers(tree map[string]any) ([]string, error) {
	version, ok := tree["version"].(int64)
	if !ok {
		version = 1
	}
	if path, ok := criTables[version]; ok {
		return path, nil
	}
	hint := "Upgrade agentbox, or add the handler by hand."
	if version < 2 {
		hint = "`containerd config dump` (from 2.0 on also `containerd config migrate`) prints it as a newer version."
	}
	return nil, &fault.Error{Hint: hint, Err: fmt.Errorf("the configuration is of version %d, known are 2 and 3: %w",
		version, fault.ErrUnsupported)}
}

// addHandler registers a runtime handler in the text of a config.toml.
func addHandler(doc []byte, name, path string) ([]byte, error) {
	if len(strings.TrimSpace(string(doc))) == 0 {
		doc = []byte("version = 2\n")
	}
	tree, err := decodeTOML(doc)
	if err != nil {
		return nil, err
	}
	table, err := handlers(tree)
	if err != nil {
		return nil, err
	}
	own := append(slices.Clone(table), name)
	if there, ok := lookup(tree, own...); ok && handlerIs(there, path) {
		return doc, nil
	}
	lines := []string{
		header(own...),
		"  runtime_type = " + quoteTOML(runcShim),
		"  " + header(append(slices.Clone(own), "options")...),
		"    BinaryName = " + quoteTOML(path),
	}
	// A node whose kubelet manages cgroups through systemd says so for runc;
	// pods of another runtime must do likewise or fail to start.
	if v, _ := lookup(tree, append(slices.Clone(table), "runc", "options", "SystemdCgroup")...); v == true {
		lines = append(lines, "    SystemdCgroup = true")
	}
	var out []byte
	if without, ok := cutBlock(doc, "containerd", name); ok {
		out = appendBlock(without, "containerd", name, lines)
	} else if _, ok := lookup(tree, own...); !ok {
		out = appendBlock(doc, "containerd", name, lines)
	} else {
		binary := append(slices.Clone(own), "options", "BinaryName")
		if out, ok, err = setString(doc, path, binary...); err != nil {
			return nil, err
		} else if !ok {
			return nil, &fault.Error{
				Hint: "Change it by hand, or register agentbox's under another name with --name.",
				Err: fmt.Errorf("%s is there already, for something else: %w",
					strings.Join(own, "."), fault.ErrExists),
			}
		}
	}
	if err := prove(doc, out, own...); err != nil {
		return nil, err
	}
	tree, err = decodeTOML(out)
	if err != nil {
		return nil, err
	}
	if there, _ := lookup(tree, own...); !handlerIs(there, path) {
		return nil, &fault.Error{
			Hint: "Change it by hand, or register agentbox's under another name with --name.",
			Err: fmt.Errorf("%s is there already, for another kind of runtime: %w",
				strings.Join(own, "."), fault.ErrExists),
		}
	}
	return out, nil
}

func handlerIs(v any, path string) bool {
	tree, ok := v.(map[string]any)
	if !ok {
		return false
	}
	kind, _ := lookup(tree, "runtime_type")
	binary, _ := lookup(tree, "options", "BinaryName")
	return kind == runcShim && binary == path
}

// removeHandler takes out what addHandler put in.
func removeHandler(doc []byte, name string) ([]byte, error) {
	tree, err := decodeTOML(doc)
	if err != nil {
		return nil, err
	}
	table, err := handlers(tree)
	if err != nil {
		return nil, err
	}
	own := append(slices.Clone(table), name)
	return removeBlock(doc, tree, "containerd", name, own)
}

// removeBlock takes our block out and proves that nothing else goes with it.
func removeBlock(doc []byte, tree map[string]any, engine, name string, own []string) ([]byte, error) {
	out, ok := cutBlock(doc, engine, name)
	if !ok {
		if _, there := lookup(tree, own...); there {
			return nil, &fault.Error{
				Hint: "Take it out by hand.",
				Err: fmt.Errorf("%s is there, but setup did not put it there: %w",
					strings.Join(own, "."), fault.ErrState),
			}
		}
		return doc, nil
	}
	if err := prove(doc, out, own...); err != nil {
		return nil, &fault.Error{Hint: "Something stands between or behind setup's lines that belongs to them now: move it, or take them out by hand.", Err: err}
	}
	return out, nil
}

// validateContainerd has containerd read a configuration; known is false
// without a containerd.
func validateContainerd(ctx context.Context, path string) (known bool, err error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := command(ctx, "containerd", "--config", path, "config", "dump")
	var stderr strings.Builder
	cmd.Stderr = &stderr
	err = cmd.Run()
	switch {
	case err == nil:
		return true, nil
	case ctx.Err() != nil:
		return false, ctx.Err()
	case errors.Is(err, exec.ErrNotFound):
		return false, nil
	}
	return true, fmt.Errorf("containerd does not accept it: %s: %w",
		lastLine([]byte(stderr.String())), fault.ErrInvalid)
}
