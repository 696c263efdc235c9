package main

import (
	"strings"

	"github.com/agentbox/agentbox/criu/stage"
)

// call is what the wrapper understands of an OCI runtime's command line.
type call struct {
	globals []string // as given, to be repeated before another subcommand
	root    string   // --root; empty: the runtime's default
	log     string   // --log
	logJSON bool     // --log-format json
	verb    string
	flags   map[string]string // the verb's flags: bundle, pid-file, console-socket, no-pivot, process
	id      string            // the last argument; of exec, the one before the command
	slot    stage.Slot        // of the container; not of the command line
}

// bundle is where the container's config.json is.
func (c call) bundle() string {
	if b := c.flags["bundle"]; b != "" {
		return b
	}
	return "."
}

// Flags of runc and crun, without dashes; the value reports whether one takes an argument.
var (
	globalFlags = map[string]bool{
		"root": true, "log": true, "log-format": true, "criu": true, "rootless": true,
		"cgroup-manager": true, "log-level": true,
		"debug": false, "systemd-cgroup": false, "help": false, "h": false, "version": false, "v": false,
	}
	createFlags = map[string]bool{
		"bundle": true, "b": true, "console-socket": true, "pid-file": true, "pidfd-socket": true, "preserve-fds": true,
		"config": true, "f": true, "no-mount-fallback": false, "no-pivot": false, "no-new-keyring": false,
		"no-subreaper": false, "keep": false,
		"detach": false, "d": false,
	}
	execFlags = map[string]bool{
		"process": true, "p": true, "pid-file": true, "console-socket": true, "pidfd-socket": true,
		"preserve-fds": true, "cwd": true,
		"env": true, "e": true, "user": true, "u": true, "additional-gids": true, "g": true,
		"process-label": true, "apparmor": true,
		"cap": true, "c": true, "cgroup": true, "tty": false, "t": false, "detach": false,
		"d": false, "no-new-privs": false,
		"no-subreaper": false, "ignore-paused": false,
	}
	startFlags  = map[string]bool{} // of pause too
	deleteFlags = map[string]bool{"force": false, "f": false, "regex": false, "r": false}
)

// parse reads args, the command line without the program. It returns false
// when it is not certain of having understood all of it.
func parse(args []string) (call, bool) {
	c := call{flags: map[string]string{}}
	i, ok := scan(args, globalFlags, func(name, value string) {
		switch name {
		case "root":
			c.root = value
		case "log":
			c.log = value
		case "log-format":
			c.logJSON = value == "json"
		}
	})
	if !ok || i == len(args) {
		return c, false
	}
	c.globals, c.verb = args[:i], args[i]
	var known map[string]bool
	switch c.verb {
	case "create", "run":
		known = createFlags
	case "exec":
		known = execFlags
	case "start", "pause":
		known = startFlags
	case "delete":
		known = deleteFlags
	default:
		return c, false
	}
	rest := args[i+1:]
	i, ok = scan(rest, known, func(name, value string) {
		switch {
		case name == "b":
			name = "bundle"
		case name == "p" && c.verb == "exec":
			name = "process"
		}
		c.flags[name] = value
	})
	if !ok || i == len(rest) {
		return c, false
	}
	c.id, rest = rest[i], rest[i+1:]
	if c.verb == "delete" { // runc takes `delete ID --force` too, and people write it
		i, ok = scan(rest, known, func(string, string) {})
		rest = rest[i:]
	}
	return c, ok && (len(rest) == 0 || c.verb == "exec")
}

// scan reads leading flags and returns the position of the first argument
// that is none. A flag it does not know makes it give up, unless the flag
// carries its value with it.
func scan(args []string, known map[string]bool, found func(name, value string)) (int, bool) {
	for i := 0; i < len(args); i++ {
		arg := args[i]
		if arg == "--" {
			return i + 1, true
		}
		if len(arg) < 2 || arg[0] != '-' {
			return i, true
		}
		name, value, inline := strings.Cut(strings.TrimPrefix(arg[1:], "-"), "=")
		takes, ok := known[name]
		switch {
		case inline:
			found(name, value)
		case !ok:
			return i, false
		case takes:
			if i++; i == len(args) {
				return i, false
			}
			found(name, args[i])
		default:
			found(name, "true")
		}
	}
	return len(args), true
}
