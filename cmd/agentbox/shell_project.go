package main

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/agentbox/agentbox/internal/fsx"
	"github.com/agentbox/agentbox/internal/project"
	"github.com/agentbox/agentbox/internal/rights"
	"github.com/agentbox/agentbox/runtime"
)

// readProject takes over what the directory's .agentbox.yaml asks for, once the user accepts it.
func (sh *shell) readProject(ctx context.Context) error {
	var data []byte
	err := rights.As(sh.user.User, func() (err error) {
		data, err = project.Read(sh.dir)
		return err
	})
	if err != nil {
		return &runtime.Error{Op: "read", ID: filepath.Join(sh.dir, project.Name), Err: err}
	}
	file, err := project.Parse(data)
	if err != nil {
		return &runtime.Error{
			Op: "read", ID: sh.dir, Err: err, Hint: "docs/agentbox-yaml.md has its keys.",
		}
	}
	words := file.Words()
	if len(words) == 0 {
		return nil
	}
	if err := sh.accept(ctx, data, words); err != nil {
		return err
	}
	return sh.opts.takeOver(file, sh.dir)
}

// accept asks the user whether a sandbox shall have what the file asks for, unless that was
// accepted before.
func (sh *shell) accept(ctx context.Context, data []byte, words []string) error {
	if sh.opts.Trust {
		return sh.remember(data)
	}
	trust := project.Trust{Dir: filepath.Join(sh.user.configDir(), "agentbox", "trusted")}
	known := false
	err := rights.As(sh.user.User, func() (err error) {
		known, err = trust.Has(sh.dir, data)
		return err
	})
	if known || err != nil {
		return err
	}
	out := sh.app.stderr
	fmt.Fprintf(out, "By %s the sandbox\n", printable(filepath.Join(sh.dir, project.Name)))
	for _, line := range words {
		fmt.Fprintf(out, "  %s\n", line)
	}
	if !isTerminal(sh.app.stdin) {
		return &runtime.Error{
			Op: "read", ID: filepath.Join(sh.dir, project.Name),
			Err:  fmt.Errorf("%w: you have not accepted it", runtime.ErrDenied),
			Hint: "Accept it with --trust, or on a terminal.",
		}
	}
	fmt.Fprint(out, "Make it so? [y/N] ")
	if err := confirmed(ctx, sh.app.stdin, out, "nothing was made"); err != nil {
		return err
	}
	return sh.remember(data)
}

func (sh *shell) remember(data []byte) error {
	trust := project.Trust{Dir: filepath.Join(sh.user.configDir(), "agentbox", "trusted")}
	return rights.As(sh.user.User, func() error { return trust.Add(sh.dir, data) })
}

// takeOver sets what a file asks for where no flag does.
func (o *shellOptions) takeOver(file project.File, dir string) error {
	given := func(flags ...string) bool {
		return slices.ContainsFunc(flags, func(f string) bool { return slices.Contains(o.given, f) })
	}
	if o.Image = cmp.Or(o.Image, os.Getenv("AGENTBOX_IMAGE"), file.Image); !given("memory") {
		o.Memory = file.Memory
	}
	if !given("cpus") {
		o.CPUs = file.CPUs
	}
	if !given("network", "egress") {
		o.Network, o.Egress = file.Network, file.Egress
		if file.Egress != nil && o.Network == "" {
			o.Network = runtime.NetworkFiltered
		}
	}
	var env []string
	for _, name := range slices.Sorted(maps.Keys(file.Env)) {
		env = append(env, name+"="+file.Env[name])
	}
	o.Env = append(env, o.Env...) // the last one of a name counts
	return o.takeOverSecrets(file.Secrets, dir)
}

func (o *shellOptions) takeOverSecrets(secrets map[string]string, dir string) error {
	own, err := o.Secrets.parse()
	if err != nil {
		return err
	}
	for _, name := range slices.Sorted(maps.Keys(secrets)) {
		if slices.ContainsFunc(own, func(s runtime.Secret) bool { return s.Name == name }) {
			continue
		}
		from := secrets[name]
		if file, ok := strings.CutPrefix(from, "file:"); ok && (!filepath.IsAbs(file) || fsx.Within(dir, file)) {
			// What lies in it may be replaced by an apply, and by a link to any file.
			return usageErrorf("%s: secrets.%s: name an absolute path outside of the directory", project.Name, name)
		}
		o.Secrets = append(o.Secrets, name+"="+from)
	}
	return nil
}
