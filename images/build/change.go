package build

import (
	"encoding/json"
	"fmt"
	"path"
	"slices"
	"strings"
	"unicode"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/moby/sys/signal"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/lazy"
)

// Change applies instructions of a Dockerfile to a configuration: CMD, ENTRYPOINT, ENV, LABEL,
// USER, WORKDIR, EXPOSE, VOLUME and STOPSIGNAL, as `docker commit --change` does. An ENTRYPOINT
// drops the image's own CMD unless one of the instructions is a CMD. Any other instruction is
// fault.ErrInvalid.
func Change(cfg *v1.Config, instructions []string) error {
	command := false
	for _, line := range instructions {
		name, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
		rest = strings.TrimSpace(rest)
		name = strings.ToUpper(name)
		do := changes[name]
		if do == nil {
			return &fault.Error{
				Err:  fmt.Errorf("%w: change %.100q", fault.ErrInvalid, line),
				Hint: "Changes are CMD, ENTRYPOINT, ENV, LABEL, USER, WORKDIR, EXPOSE, VOLUME and STOPSIGNAL, each with its values.",
			}
		}
		if rest == "" {
			return fmt.Errorf("%w: change %.100q has no value", fault.ErrInvalid, line)
		}
		if err := do(cfg, rest); err != nil {
			return fmt.Errorf("%w: change %.100q: %w", fault.ErrInvalid, line, err)
		}
		switch name {
		case "CMD":
			command = true
		case "ENTRYPOINT":
			if !command {
				cfg.Cmd = nil
			}
		}
	}
	return nil
}

var changes = map[string]func(cfg *v1.Config, rest string) error{
	"CMD":        func(cfg *v1.Config, rest string) error { cfg.Cmd = command(rest); return nil },
	"ENTRYPOINT": func(cfg *v1.Config, rest string) error { cfg.Entrypoint = command(rest); return nil },
	"ENV":        changeEnv,
	"LABEL":      changeLabel,
	"USER":       changeUser,
	"WORKDIR":    changeWorkdir,
	"EXPOSE":     changeExpose,
	"VOLUME":     changeVolume,
	"STOPSIGNAL": changeSignal,
}

// command reads a JSON array of words, or else a line for the shell.
func command(rest string) []string {
	if list, ok := array(rest); ok {
		return list
	}
	return []string{"/bin/sh", "-c", rest}
}

func array(rest string) (list []string, ok bool) {
	if !strings.HasPrefix(rest, "[") || json.Unmarshal([]byte(rest), &list) != nil {
		return nil, false
	}
	if list == nil {
		list = []string{}
	}
	return list, true
}

func changeEnv(cfg *v1.Config, rest string) error {
	list, err := pairs(rest)
	for _, p := range list {
		kv := p[0] + "=" + p[1]
		i := slices.IndexFunc(cfg.Env, func(have string) bool { return strings.HasPrefix(have, p[0]+"=") })
		if i < 0 {
			cfg.Env = append(cfg.Env, kv)
		} else {
			cfg.Env[i] = kv
		}
	}
	return err
}

func changeLabel(cfg *v1.Config, rest string) error {
	list, err := pairs(rest)
	for _, p := range list {
		if cfg.Labels == nil {
			cfg.Labels = map[string]string{}
		}
		cfg.Labels[p[0]] = p[1]
	}
	return err
}

func changeUser(cfg *v1.Config, rest string) error {
	if strings.ContainsFunc(rest, unicode.IsSpace) {
		return fmt.Errorf("%q is more than one user", rest)
	}
	cfg.User = rest
	return nil
}

func changeWorkdir(cfg *v1.Config, rest string) error {
	list, err := words(rest)
	if err != nil || len(list) != 1 {
		return fmt.Errorf("it is not one directory (%v)", err)
	}
	dir := list[0]
	if !path.IsAbs(dir) {
		dir = path.Join("/", cfg.WorkingDir, dir)
	}
	cfg.WorkingDir = path.Clean(dir)
	return nil
}

var portRule = lazy.Regexp(`^[0-9]{1,5}(-[0-9]{1,5})?(/(tcp|udp|sctp))?$`)

func changeExpose(cfg *v1.Config, rest string) error {
	for _, port := range strings.Fields(rest) {
		if !portRule().MatchString(port) {
			return fmt.Errorf("%q is not PORT[/PROTOCOL]", port)
		}
		if !strings.Contains(port, "/") {
			port += "/tcp"
		}
		if cfg.ExposedPorts == nil {
			cfg.ExposedPorts = map[string]struct{}{}
		}
		cfg.ExposedPorts[port] = struct{}{}
	}
	return nil
}

func changeVolume(cfg *v1.Config, rest string) error {
	list, ok := array(rest)
	if !ok {
		var err error
		if list, err = words(rest); err != nil {
			return err
		}
	}
	for _, v := range list {
		if !path.IsAbs(v) || path.Clean(v) == "/" {
			return fmt.Errorf("%q is not an absolute path other than /", v)
		}
		if cfg.Volumes == nil {
			cfg.Volumes = map[string]struct{}{}
		}
		cfg.Volumes[path.Clean(v)] = struct{}{}
	}
	return nil
}

func changeSignal(cfg *v1.Config, rest string) error {
	if _, err := signal.ParseSignal(rest); err != nil {
		return err
	}
	cfg.StopSignal = rest
	return nil
}

// pairs reads KEY=VALUE..., or one KEY VALUE.
func pairs(rest string) (list [][2]string, err error) {
	key, value, spaced := strings.Cut(rest, " ")
	if spaced && !strings.Contains(key, "=") {
		return [][2]string{{key, strings.TrimSpace(value)}}, nil
	}
	all, err := words(rest)
	if err != nil {
		return nil, err
	}
	for _, w := range all {
		key, value, ok := strings.Cut(w, "=")
		if !ok || key == "" {
			return nil, fmt.Errorf("%q is not KEY=VALUE", w)
		}
		list = append(list, [2]string{key, value})
	}
	return list, nil
}

// words splits a line at spaces outside of quotes, which it takes away; a
// backslash keeps what follows it.
func words(line string) (list []string, err error) {
	var word strings.Builder
	quote, open, escaped := rune(0), false, false
	for _, c := range line {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\' && quote != '\'':
			escaped, open = true, true
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(c)
		case c == '"' || c == '\'':
			quote, open = c, true
		case unicode.IsSpace(c):
			if open {
				list = append(list, word.String())
				word.Reset()
			}
			open = false
		default:
			word.WriteRune(c)
			open = true
		}
	}
	if quote != 0 || escaped {
		return nil, fmt.Errorf("a quote is not closed")
	}
	if open {
		list = append(list, word.String())
	}
	return list, nil
}
