package main

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/agentbox/agentbox/runtime"
)

// What a shell needs in its sandbox.
const (
	shellDir     = "/etc/agentbox"
	shellProgram = shellDir + "/shell" // the user's shell, or the command that it is given
	shellCommand = shellDir + "/run"   // the sandbox's own command: it is written at each start
)

// shellScript chooses the shell among those that the image has, and a locale that it has.
const shellScript = `#!/bin/sh
# The shell of 'agentbox shell', or the command that it is given.
if command -v locale >/dev/null 2>&1 && [ -n "$(locale 2>&1 >/dev/null)" ]; then
	export LC_ALL=C.UTF-8
fi
[ $# -eq 0 ] || exec "$@"
for shell in "$SHELL" /bin/bash /usr/bin/bash; do
	[ -x "$shell" ] || continue
	export SHELL="$shell"
	if [ -t 0 ] && [ "$` + stepsVariable + `" != ` + runtime.StepsOff + ` ]; then
		case $shell in
		*/bash) exec "$shell" --rcfile ` + shellDir + `/bashrc ;;
		*/zsh) ZDOTDIR=` + shellDir + `/zsh exec "$shell" ;;
		*/fish) exec "$shell" -C 'source ` + shellDir + `/fish' ;;
		esac
	fi
	exec "$shell"
done
export SHELL=/bin/sh
exec /bin/sh
`

// writeFile writes a file of root's into a sandbox.
func writeFile(
	ctx context.Context, svc runtime.Service, sandbox string, f runtime.SetupFile, now time.Time,
) error {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	err := w.WriteHeader(&tar.Header{
		Typeflag: tar.TypeReg, Name: f.Path[1:], Mode: int64(f.Mode), Size: int64(len(f.Data)), ModTime: now,
	})
	if err == nil {
		_, err = w.Write(f.Data)
	}
	if err := errors.Join(err, w.Close()); err != nil {
		return err
	}
	return svc.CopyTo(ctx, sandbox, "/", &b)
}

// commandFile is the command of a sandbox, with the directory and the terminal of this start.
func commandFile(dir string, env, args []string) runtime.SetupFile {
	var b strings.Builder
	b.WriteString("#!/bin/sh\n# The command of the sandbox, as 'agentbox shell' has started it last.\n")
	fmt.Fprintf(&b, "cd %s || exit 126\n", shellQuote(dir))
	for _, kv := range env {
		name, value, _ := strings.Cut(kv, "=")
		fmt.Fprintf(&b, "export %s=%s\n", name, shellQuote(value))
	}
	b.WriteString("exec " + shellProgram)
	for _, arg := range args {
		b.WriteString(" " + shellQuote(arg))
	}
	return runtime.SetupFile{Path: shellCommand, Mode: 0o755, Data: []byte(b.String() + "\n")}
}

// waiting is a command for a sandbox in which all else is run by exec.
var waiting = []string{"/bin/sh", "-c", "trap 'exit 0' TERM HUP; while :; do sleep 3600 & wait $!; done"}

// shellQuote quotes a word for a shell.
func shellQuote(s string) string {
	return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
}

// setup is what a new sandbox has for its user and for the command of its first start.
func (u shellUser) setup(command runtime.SetupFile) *runtime.Setup {
	s := &runtime.Setup{Files: append([]runtime.SetupFile{
		{Path: shellProgram, Mode: 0o755, Data: []byte(shellScript)}, command,
	}, shellRC...)}
	if u.UID == 0 {
		return s
	}
	s.Account = &runtime.Account{Name: u.Name, UID: u.UID, Home: u.Home}
	for _, gid := range append([]uint32{u.GID}, u.Groups...) {
		s.Account.Groups = append(s.Account.Groups, runtime.AccountGroup{Name: groupName(gid), GID: gid})
	}
	return s
}
