package setup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
)

// PodmanConfig is the drop-in that setup makes; Podman merges it with its
// other configuration.
const PodmanConfig = "/etc/containers/containers.conf.d/50-agentbox.conf"

// podmanRuntimes is where Podman's runtimes stand: name -> list of paths.
var podmanRuntimes = []string{"engine", "runtimes"}

// Podman registers the runtime in a containers.conf. There is no daemon to
// tell: the next podman reads it.
func Podman(ctx context.Context, opts Options) (Result, error) {
	opts, r, err := opts.resolve("podman", PodmanConfig)
	if err != nil {
		return r, err
	}
	p := podman{name: opts.Name}
	edit := tomlEdit{
		opts: opts, result: &r,
		add:    func(doc []byte, path string) ([]byte, error) { return addPodman(doc, opts.Name, path) },
		remove: func(doc []byte) ([]byte, error) { return removePodman(doc, opts.Name) },
		// Podman has no way to check a file that is not in its place; what is
		// in its place is asked for below.
		validate: func(string) (bool, error) { return true, nil },
		path: func(tree map[string]any) string {
			paths := podmanPaths(tree, opts.Name)
			if len(paths) == 0 {
				return ""
			}
			return paths[0]
		},
		empty: func(doc []byte) bool { return len(bytes.TrimSpace(doc)) == 0 },
		inUse: func() ([]string, error) { return p.users(ctx) },
	}
	if p.config, err = filepath.Abs(opts.Config); err != nil {
		return r, err
	}
	if err := edit.run(); err != nil || opts.DryRun {
		return r, err
	}
	if os.Getenv("CONTAINERS_CONF") != "" && !p.ownsEnv() {
		r.note("CONTAINERS_CONF is set: where it is, podman reads that file only, and not %s", edit.file.path)
	}
	if opts.Remove {
		return r, nil
	}
	path, err := p.knows(ctx)
	switch {
	case errors.Is(err, exec.ErrNotFound):
		r.note("podman is not installed here and was not asked")
	case err != nil || path != opts.Runtime:
		if err == nil {
			err = fmt.Errorf("podman says that %s is %s: another configuration file says so: %w",
				opts.Name, path, fault.ErrState)
		}
		if r.Changed {
			return r, edit.putBack(err)
		}
		return r, err
	default:
		r.Verified = true
	}
	return r, nil
}

func podmanPaths(tree map[string]any, name string) (paths []string) {
	v, _ := lookup(tree, append(slices.Clone(podmanRuntimes), name)...)
	list, _ := v.([]any)
	for _, p := range list {
		if s, ok := p.(string); ok {
			paths = append(paths, s)
		}
	}
	return paths
}

// addPodman registers a runtime in the text of a containers.conf.
func addPodman(doc []byte, name, path string) ([]byte, error) {
	tree, err := decodeTOML(doc)
	if err != nil {
		return nil, err
	}
	own := append(slices.Clone(podmanRuntimes), name)
	if slices.Equal(podmanPaths(tree, name), []string{path}) {
		return doc, nil
	}
	without, ours := cutBlock(doc, "podman", name)
	if _, there := lookup(tree, own...); there && !ours {
		return nil, &fault.Error{
			Hint: "Change it by hand, or register agentbox's under another name with --name.",
			Err:  fmt.Errorf("%s is there already: %w", strings.Join(own, "."), fault.ErrExists),
		}
	}
	key := strings.Trim(header(name), "[]")
	line := key + " = [" + quoteTOML(path) + "]"
	out, ok, err := insertBelow(without, "podman", name, []string{line}, podmanRuntimes...)
	if err != nil {
		return nil, err
	}
	if !ok {
		out = appendBlock(without, "podman", name, []string{header(podmanRuntimes...), line})
	}
	return out, prove(doc, out, own...)
}

// removePodman takes out what addPodman put in.
func removePodman(doc []byte, name string) ([]byte, error) {
	tree, err := decodeTOML(doc)
	if err != nil {
		return nil, err
	}
	return removeBlock(doc, tree, "podman", name, append(slices.Clone(podmanRuntimes), name))
}

// podman asks podman, as it is with a configuration.
type podman struct{ name, config string }

// ownsEnv reports whether CONTAINERS_CONF is the file at hand.
func (p podman) ownsEnv() bool {
	a, err := os.Stat(os.Getenv("CONTAINERS_CONF"))
	if err != nil {
		return false
	}
	b, err := os.Stat(p.config)
	return err == nil && os.SameFile(a, b)
}

// env makes podman read the configuration: it finds those in its own
// directories itself, unless CONTAINERS_CONF says otherwise.
func (p podman) env() (env []string) {
	for _, e := range os.Environ() {
		if !strings.HasPrefix(e, "CONTAINERS_CONF=") {
			env = append(env, e)
		}
	}
	switch filepath.Dir(p.config) {
	case "/etc/containers", "/etc/containers/containers.conf.d":
		return env
	}
	return append(env, "CONTAINERS_CONF="+p.config)
}

func (p podman) run(ctx context.Context, args ...string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	cmd := command(ctx, "podman", args...)
	cmd.Env = p.env()
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil && !errors.Is(err, exec.ErrNotFound) {
		err = fmt.Errorf("podman %s: %w: %s", args[0], err, lastLine([]byte(stderr.String())))
	}
	return out, err
}

// knows returns the path that podman has for the runtime, which it starts to
// ask for its version.
func (p podman) knows(ctx context.Context) (string, error) {
	out, err := p.run(ctx, "--runtime", p.name, "info", "--format", "json")
	if err != nil {
		return "", err
	}
	var info struct {
		Host struct {
			OCIRuntime struct {
				Name string `json:"name"`
				Path string `json:"path"`
			} `json:"ociRuntime"`
		} `json:"host"`
	}
	if err := json.Unmarshal(out, &info); err != nil {
		return "", fmt.Errorf("podman info: %w", err)
	}
	return info.Host.OCIRuntime.Path, nil
}

// users lists the containers that were made with the runtime.
func (p podman) users(ctx context.Context) (names []string, err error) {
	ids, err := p.run(ctx, "ps", "--all", "--quiet", "--no-trunc")
	if errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	if err != nil || len(strings.Fields(string(ids))) == 0 {
		return nil, err
	}
	out, err := p.run(ctx, append([]string{"inspect", "--type", "container", "--format", "{{.OCIRuntime}} {{.Name}}"},
		strings.Fields(string(ids))...)...)
	if err != nil {
		return nil, err
	}
	for _, line := range strings.Split(string(out), "\n") {
		if runtime, name, ok := strings.Cut(line, " "); ok && runtime == p.name {
			names = append(names, name)
		}
	}
	return names, nil
}
