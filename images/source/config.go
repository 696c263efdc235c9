package source

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/pelletier/go-toml/v2"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/reference"
	"github.com/agentbox/agentbox/internal/fault"
)

const configPath = "/etc/agentbox/registries.toml"

// LoadConfig reads path; empty: AGENTBOX_REGISTRIES_CONF, or else
// /etc/agentbox/registries.toml, which need not be there.
func LoadConfig(path string) (image.SourceConfig, error) {
	var c image.SourceConfig
	if path == "" {
		path = os.Getenv("AGENTBOX_REGISTRIES_CONF")
	}
	optional := path == ""
	if optional {
		path = configPath
	}
	f, err := os.Open(path)
	if optional && errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return c, fmt.Errorf("read the configuration of registries: %w", err)
	}
	defer f.Close()
	if err := toml.NewDecoder(f).DisallowUnknownFields().Decode(&c); err != nil {
		detail := err.Error()
		if strict := (*toml.StrictMissingError)(nil); errors.As(err, &strict) {
			detail = strict.String()
		}
		return c, fmt.Errorf("%s: %w: %s", path, fault.ErrInvalid, detail)
	}
	if err := checkConfig(c); err != nil {
		return c, fmt.Errorf("%s: %w", path, err)
	}
	return c, nil
}

func checkConfig(c image.SourceConfig) error {
	if _, err := reference.Parse("probe", c.Default); err != nil {
		return fmt.Errorf("default %q: %w: it is no registry", c.Default, fault.ErrInvalid)
	}
	seen := map[string]bool{}
	for _, r := range c.Registries {
		if _, err := name.NewRegistry(r.Name, name.StrictValidation); err != nil || r.Name == "" || seen[r.Name] {
			return fmt.Errorf("registry %q: %w: it is no HOST[:PORT], or there twice", r.Name, fault.ErrInvalid)
		}
		seen[r.Name] = true
		for _, m := range r.Mirrors {
			scheme, rest, ok := strings.Cut(m, "://")
			if !ok {
				scheme, rest = "https", m
			}
			if _, err := name.NewRepository(strings.TrimSuffix(rest, "/")+"/probe/x",
				name.StrictValidation); err != nil || scheme != "https" && scheme != "http" {
				return fmt.Errorf("registry %q: %w: mirror %q is no [http[s]://]HOST[:PORT][/PREFIX]",
					r.Name, fault.ErrInvalid, m)
			}
		}
	}
	return nil
}

// registryOf is what the file says of host.
func registryOf(c image.SourceConfig, host string) image.Registry {
	for _, r := range c.Registries {
		if r.Name == host {
			return r
		}
	}
	return image.Registry{Name: host}
}

// configOf is the one that the options name, or that of the machine.
func configOf(o image.SourceOptions) (image.SourceConfig, error) {
	if o.Config != nil {
		return *o.Config, nil
	}
	return LoadConfig("")
}
