package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/docker/go-units"
	"github.com/moby/sys/signal"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/lazy"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// Everything here parses one thing that a user of Docker is used to write. An
// error says what was read and what is wanted instead.

// parseEnv turns --env-file and --env into KEY=VALUE, files first, the last
// one of a key winning in the place of the first. A key alone takes the
// caller's value, or none when the caller has none.
func parseEnv(files, flags []string, lookup func(string) (string, bool)) ([]string, error) {
	var all []string
	for _, f := range files {
		vars, err := parseEnvFile(f, lookup)
		if err != nil {
			return nil, err
		}
		all = append(all, vars...)
	}
	for _, f := range flags {
		key, _, found := strings.Cut(f, "=")
		if key == "" {
			return nil, usageErrorf("--env %q: the name is missing; write NAME=VALUE or NAME", f)
		}
		if strings.ContainsRune(f, 0) {
			return nil, usageErrorf("--env %s: a NUL byte cannot be part of an environment", key)
		}
		if !found {
			value, ok := lookup(key)
			if !ok {
				continue
			}
			f = key + "=" + value
		}
		all = append(all, f)
	}
	var env []string
	at := map[string]int{}
	for _, kv := range all {
		key, _, _ := strings.Cut(kv, "=")
		if i, ok := at[key]; ok {
			env[i] = kv
			continue
		}
		at[key] = len(env)
		env = append(env, kv)
	}
	return env, nil
}

// parseEnvFile reads one variable per line by Docker's rules: what follows
// the first = is the value as it stands, quotes and spaces included.
func parseEnvFile(name string, lookup func(string) (string, bool)) ([]string, error) {
	data, err := os.ReadFile(name)
	if err != nil {
		return nil, usageErrorf("--env-file: %v", err)
	}
	var vars []string
	sc := bufio.NewScanner(bytes.NewReader(bytes.TrimPrefix(data, []byte("\xef\xbb\xbf"))))
	sc.Buffer(nil, len(data)+1)
	for n := 1; sc.Scan(); n++ {
		if !utf8.Valid(sc.Bytes()) {
			return nil, usageErrorf("--env-file %s, line %d: not UTF-8", name, n)
		}
		line := strings.TrimLeftFunc(sc.Text(), unicode.IsSpace)
		if line == "" || line[0] == '#' {
			continue
		}
		key, _, found := strings.Cut(line, "=")
		switch {
		case key == "":
			return nil, usageErrorf("--env-file %s, line %d: the name is missing; write NAME=VALUE or NAME", name, n)
		case strings.ContainsFunc(key, unicode.IsSpace):
			return nil, usageErrorf("--env-file %s, line %d: the name %q contains white space", name, n, key)
		case strings.ContainsRune(line, 0):
			return nil, usageErrorf("--env-file %s, line %d: a NUL byte cannot be part of an environment", name, n)
		case found:
			vars = append(vars, line)
		default:
			if value, ok := lookup(key); ok {
				vars = append(vars, key+"="+value)
			}
		}
	}
	return vars, sc.Err()
}

// parseWorkspace reads DIR[:PATH][:ro]. DIR is the caller's; PATH is DIR unless given.
func parseWorkspace(s string) (runtime.Mount, error) {
	m := runtime.Mount{Type: runtime.MountWorkspace}
	bad := func(why string) (runtime.Mount, error) {
		return m, usageErrorf("--workspace %q: %s; write DIR, DIR:PATH or DIR:PATH:ro", s, why)
	}
	parts := strings.Split(s, ":")
	switch last := parts[len(parts)-1]; {
	case len(parts) > 1 && (last == "ro" || last == "readonly"):
		m.ReadOnly, parts = true, parts[:len(parts)-1]
	case len(parts) > 1 && last == "rw":
		parts = parts[:len(parts)-1]
	}
	if len(parts) > 2 {
		return bad("it has too many parts")
	}
	if parts[0] == "" {
		return bad("the directory is empty")
	}
	var err error
	if m.Source, err = filepath.Abs(parts[0]); err != nil {
		return bad(err.Error())
	}
	if m.Target, err = mountTarget(parts[len(parts)-1]); len(parts) == 1 {
		m.Target, err = mountTarget(m.Source)
	}
	if err != nil {
		return bad(err.Error())
	}
	return m, bySudo(m.Source)
}

// parseVolume reads SRC:DST[:ro|rw]. A SRC that could be a name is one, of a
// volume; other relative ones are taken from the current directory.
func parseVolume(flag, s string) (runtime.Mount, error) {
	bad := func(why string) (runtime.Mount, error) {
		return runtime.Mount{}, usageErrorf("%s %q: %s; write SRC:DST or SRC:DST:ro", flag, s, why)
	}
	parts := strings.Split(s, ":")
	if len(parts) < 2 || len(parts) > 3 {
		return bad("it must have two or three parts")
	}
	m := runtime.Mount{Type: "bind"}
	if len(parts) == 3 {
		switch parts[2] {
		case "ro":
			m.ReadOnly = true
		case "rw":
		default:
			return bad(fmt.Sprintf("unknown option %q", parts[2]))
		}
	}
	if parts[0] == "" {
		return bad("the source is empty")
	}
	var err error
	if nameRE().MatchString(parts[0]) {
		m.Type, m.Source = "volume", parts[0]
	} else if m.Source, err = filepath.Abs(parts[0]); err != nil {
		return bad(err.Error())
	}
	if m.Target, err = mountTarget(parts[1]); err != nil {
		return bad(err.Error())
	}
	return m, nil
}

// parseTmpfs reads DST[:OPTIONS].
func parseTmpfs(s string) (runtime.Mount, error) {
	dst, options, _ := strings.Cut(s, ":")
	target, err := mountTarget(dst)
	if err != nil {
		return runtime.Mount{}, usageErrorf("--tmpfs %q: %v; write DST or DST:size=64m,mode=1777", s, err)
	}
	return runtime.Mount{Type: "tmpfs", Target: target, Options: options}, nil
}

func mountTarget(s string) (string, error) {
	if !path.IsAbs(s) {
		return "", fmt.Errorf("the path %q inside the sandbox is not absolute", s)
	}
	if s = path.Clean(s); s == "/" {
		return "", fmt.Errorf("nothing can be mounted over the sandbox's /")
	}
	return s, nil
}

// parsePort reads [IP:]HOST:CTR[/tcp|udp].
func parsePort(s string) (runtime.Port, error) {
	bad := func(why string) (runtime.Port, error) {
		return runtime.Port{}, usageErrorf("--publish %q: %s; write [IP:]HOST:SANDBOX[/udp]", s, why)
	}
	ports, proto, found := strings.Cut(s, "/")
	if !found {
		proto = "tcp"
	}
	if proto != "tcp" && proto != "udp" {
		return bad(fmt.Sprintf("unknown protocol %q", proto))
	}
	p := runtime.Port{Protocol: proto}
	i := strings.LastIndexByte(ports, ':')
	if i < 0 {
		return bad("the host's port is missing")
	}
	host, sandbox := ports[:i], ports[i+1:]
	if j := strings.LastIndexByte(host, ':'); j >= 0 {
		ip := strings.TrimSuffix(strings.TrimPrefix(host[:j], "["), "]")
		addr, err := netip.ParseAddr(ip)
		if err != nil {
			return bad(fmt.Sprintf("%q is not an IP address", host[:j]))
		}
		p.HostIP, host = addr.String(), host[j+1:]
	}
	for _, f := range []struct {
		text string
		to   *uint16
	}{{host, &p.Host}, {sandbox, &p.Sandbox}} {
		n, err := strconv.ParseUint(f.text, 10, 16)
		if err != nil || n == 0 {
			return bad(fmt.Sprintf("%q is not a port (1 to 65535)", f.text))
		}
		*f.to = uint16(n)
	}
	return p, nil
}

// parseLabels reads KEY=VALUE each; flag names the flag in errors.
func parseLabels(flag string, labels []string) (map[string]string, error) {
	if len(labels) == 0 {
		return nil, nil
	}
	m := make(map[string]string, len(labels))
	for _, l := range labels {
		key, value, found := strings.Cut(l, "=")
		switch {
		case !found:
			return nil, usageErrorf("%s %q: the value is missing; write KEY=VALUE (KEY= for an empty one)", flag, l)
		case key == "" || strings.ContainsFunc(key, unicode.IsSpace) || strings.ContainsFunc(key, unicode.IsControl):
			return nil, usageErrorf("%s %q: the key must not be empty or contain white space; write KEY=VALUE", flag, l)
		case !utf8.ValidString(l):
			return nil, usageErrorf("%s %q: not UTF-8", flag, l)
		}
		m[key] = value
	}
	return m, nil
}

// parseSize reads Docker's sizes: a number and b, k, m or g.
func parseSize(flag, s string) (int64, error) {
	n, err := units.RAMInBytes(s)
	if err != nil || n <= 0 {
		return 0, usageErrorf("%s %q: not a size; write for example 512m or 2g", flag, s)
	}
	return n, nil
}

// parseSwap reads Docker's limit of memory and swap together, and returns what
// it leaves to swap.
func parseSwap(s string, memory int64) (int64, error) {
	switch s {
	case "", "0": // Docker: as if it were not there
		return 0, nil
	case "-1":
		return -1, nil
	}
	n, err := parseSize("--memory-swap", s)
	switch {
	case err != nil:
		return 0, err
	case memory == 0:
		return 0, usageErrorf("--memory-swap %s needs --memory, which is a part of it", s)
	case n < memory:
		return 0, usageErrorf("--memory-swap %s is the limit of memory and swap together: it cannot be below --memory",
			s)
	}
	return n - memory, nil
}

func parseCPUs(s string) (float64, error) {
	n, err := strconv.ParseFloat(s, 64)
	if err != nil || !(n > 0 && n <= 1e6) {
		return 0, usageErrorf("--cpus %q: not a number of cores above 0; write for example 1.5", s)
	}
	return n, nil
}

// parsePids reads a limit; -1 means none, as for Docker.
func parsePids(n int64) (int64, error) {
	switch {
	case n == -1:
		return 0, nil
	case n < -1:
		return 0, usageErrorf("--pids-limit %d: must be above 0, or -1 for no limit", n)
	}
	return n, nil
}

// parseSignal checks a signal's name or number and returns it as given.
func parseSignal(flag, s string) (string, error) {
	if sig, err := signal.ParseSignal(s); err != nil || sig < 1 || sig > 64 {
		return "", usageErrorf("%s %q: unknown signal; write for example SIGTERM, TERM or 15", flag, s)
	}
	return s, nil
}

const everyFlag = "checkpoint-every"

// parseEvery reads when checkpoints are taken by themselves.
func parseEvery(s string) (string, error) {
	e, err := policy.ParseEvery(s)
	if err != nil {
		return "", usageErrorf("--checkpoint-every %w", err)
	}
	return e.String(), nil
}

var nameRE = lazy.Regexp(`^[a-zA-Z0-9][a-zA-Z0-9_.-]{0,127}$`)

// checkName judges the name of a new sandbox, checkpoint or image early and
// in the words of the flag; the service has the last word.
func checkName(flag, s string) error {
	if nameRE().MatchString(s) {
		return nil
	}
	return usageErrorf("%s %q: a name is 1 to 128 letters, digits, '_', '.' and '-', and begins with a letter or digit",
		flag, shorten(s, 40))
}

// parseSecurity reads Docker's --security-opt as far as it is ours.
func parseSecurity(opts []string) (sec runtime.Security, err error) {
	for _, opt := range opts {
		key, value, given := strings.Cut(opt, "=")
		if k, v, old := strings.Cut(opt, ":"); !given && old { // what Docker took before 17.04
			key, value, given = k, v, true
		}
		on, notBool := strconv.ParseBool(value)
		on = on || !given
		switch {
		case key == "no-new-privileges" && (!given || notBool == nil):
			sec.NoNewPrivileges, sec.NewPrivileges = on, !on
		case key == "io_uring" && (!given || notBool == nil):
			sec.IOUring = on
		case key == "seccomp" && (value == policy.SeccompDefault || value == policy.SeccompUnconfined):
			sec.Seccomp, sec.SeccompProfile = value, ""
		case key == "seccomp" && value != "":
			if sec.SeccompProfile, err = readProfile(value); err != nil {
				return sec, fmt.Errorf("--security-opt %s: %w", opt, err)
			}
			sec.Seccomp = policy.SeccompDigest(sec.SeccompProfile)
		case key == "apparmor" && value != "":
			sec.AppArmor = value
		default:
			return sec, usageErrorf("--security-opt %q: write no-new-privileges=false, io_uring, seccomp=unconfined, seccomp=FILE, apparmor=unconfined or apparmor=PROFILE", opt)
		}
	}
	return sec, nil
}

// readProfile reads a seccomp profile. Later changes to the file do not affect the sandbox.
func readProfile(file string) (string, error) {
	f, err := os.OpenFile(file, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return "", usageErrorf("no file of that name, nor unconfined")
	}
	if err != nil {
		return "", err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, policy.MaxSeccomp+1))
	if err != nil {
		return "", err
	}
	_, err = policy.ParseSeccomp(string(text))
	return string(text), err
}

// parseDetachKeys reads "ctrl-p,ctrl-q": characters and ctrl-LETTER separated
// by commas. Empty means no keys.
func parseDetachKeys(s string) ([]byte, error) {
	if s == "" {
		return nil, nil
	}
	var keys []byte
	for _, k := range strings.Split(s, ",") {
		letter, ctrl := strings.CutPrefix(strings.ToLower(k), "ctrl-")
		switch {
		case len(k) == 1 && k[0] < utf8.RuneSelf:
			keys = append(keys, k[0])
		case ctrl && len(letter) == 1 && letter[0] >= 'a' && letter[0] <= 'z':
			keys = append(keys, letter[0]-'a'+1)
		case ctrl && len(letter) == 1 && strings.Contains("@[\\]^_", letter):
			keys = append(keys, letter[0]-'@')
		default:
			return nil, usageErrorf("--detach-keys %q: unknown key %q; write for example ctrl-p,ctrl-q", s, k)
		}
	}
	return keys, nil
}
