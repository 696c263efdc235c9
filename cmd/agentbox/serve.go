package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/coreos/go-systemd/v22/activation"
	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/internal/guard"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
	"github.com/agentbox/agentbox/runtime/api/server"
	"github.com/agentbox/agentbox/runtime/doctor"
	"github.com/agentbox/agentbox/runtime/local"
)

// hostVariable names the service that commands use.
const hostVariable = "AGENTBOX_HOST"

// noService, as its value, has them use the embedded engine.
const noService = "none"

type serveOptions struct {
	Listen []string
	TLS    api.TLSFiles
	Turns  int
	upkeepOptions
}

func newServeCommand(a *app) *cobra.Command {
	var opts serveOptions
	cmd := &cobra.Command{
		Use:   "serve [flags]",
		Short: "Serve every verb over HTTP on a unix socket",
		Long: `Serve answers HTTP on a unix socket, for root and for the members of its group (agentbox,
where there is such a group); OpenAPI is at /openapi.json. Whoever may use the socket can do
on this host whatever root can. While it runs, all other commands use it, unless --backend
says otherwise; AGENTBOX_HOST=unix://PATH names a socket, AGENTBOX_HOST=none uses none.

--listen tcp://HOST:PORT adds TCP, by TLS 1.3 only, for whoever has a certificate of
--tls-client-ca; its subject is in the log. Callers set AGENTBOX_HOST=tcp://HOST:PORT, and
AGENTBOX_TLS_CERT, AGENTBOX_TLS_KEY and AGENTBOX_TLS_CA to their files.

Verbs that make the host work (create, start, checkpoint, restore, fork, rm, verify, what reads or
writes images and archives) take turns, --turns at a time; behind 256 that wait others are refused.

By itself it does each minute what 'agentbox recover' does, and now and then what 'agentbox
prune' does by the rules of the policies, within --prune-rate and in nobody's way.

/metrics is for Prometheus. With OTEL_EXPORTER_OTLP_ENDPOINT=http://HOST:PORT each verb is a span
for OpenTelemetry, as part of its caller's trace; commands know the same variables.

SIGTERM ends it: no new verbs begin, those under way have 30 s to end. Sandboxes go on.
Started by systemd it takes its socket from there, and tells when it is ready.`,
		Example: `  agentbox serve &
  curl --unix-socket /run/agentbox/agentbox.sock http://agentbox/v1/sandboxes
  agentbox serve --listen tcp://10.0.0.1:8443 --tls-cert host.pem --tls-key host.key --tls-client-ca ca.pem`,
		Annotations: exits(exitUsage, exitState, exitDenied, exitUnsupported),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			a.globals.by = "service"
			ownPassed()
			g, err := a.globals.resolve()
			if err != nil {
				return err
			}
			socket, tcp, err := opts.places(g)
			if err = errors.Join(err, opts.upkeepOptions.check()); err != nil {
				return err
			}
			if local.Adopts(g.Backend) {
				return &runtime.Error{Op: "serve",
					Err: fmt.Errorf("%w: backend %s makes no sandboxes, which is what --backend is for",
						runtime.ErrUnsupported, g.Backend),
					Hint: fmt.Sprintf("Serve without it: %s://NAME is served with any backend.", g.Backend)}
			}
			if !cmd.Flags().Changed("log-level") { // so that requests are logged
				slog.SetDefault(a.logger())
			}
			return a.engine(cmd.Context(), func(svc runtime.Service) error {
				var more []net.Listener
				if tcp != "" {
					l, err := server.ListenTLS(tcp, opts.TLS)
					if err != nil {
						return &runtime.Error{Op: "serve", ID: "tcp://" + tcp, Err: err}
					}
					more = append(more, l)
				}
				return a.serve(cmd.Context(), g, socket, svc, more, opts)
			})
		},
	}
	fl := cmd.Flags()
	fl.Var(list(&opts.Listen), "listen",
		"`unix://PATH` of the socket (default: agentbox.sock in /run/agentbox, or in run of --root), or tcp://HOST:PORT beside it")
	fl.StringVar(&opts.TLS.Cert, "tls-cert", "", "for TCP: `FILE` with the certificate of this service, in PEM")
	fl.StringVar(&opts.TLS.Key, "tls-key", "", "for TCP: `FILE` with its key")
	fl.StringVar(&opts.TLS.CA, "tls-client-ca", "",
		"for TCP: `FILE` with the authority that signs callers' certificates")
	fl.IntVar(&opts.Turns, "turns", 0,
		"at most `N` heavy verbs (create, checkpoint, restore, rm and such) at work at a time, while others wait; 0: as many as there are processors, and at least 2")
	opts.upkeepOptions.addFlags(fl)
	completeFlags(cmd)
	return cmd
}

// places are where to listen; tcp may be empty.
func (o *serveOptions) places(g globals) (socket, tcp string, err error) {
	if o.Turns < 0 {
		return "", "", usageErrorf("--turns %d: a number from 1 on; 0: as many as there are processors", o.Turns)
	}
	for _, s := range o.Listen {
		into, read := &socket, socketPath
		if strings.HasPrefix(s, tcpScheme) {
			into, read = &tcp, tcpAddress
		}
		if *into != "" {
			return "", "", usageErrorf("--listen %q: there can be one socket, and one address of TCP", s)
		}
		if *into, err = read("--listen", s); err != nil {
			return "", "", err
		}
	}
	switch files := o.TLS; {
	case tcp != "" && (files.Cert == "" || files.Key == "" || files.CA == ""):
		return "", "", usageErrorf("TCP is served by mutual TLS only: give --tls-cert, --tls-key and --tls-client-ca")
	case tcp == "" && files != api.TLSFiles{}:
		return "", "", usageErrorf("--tls-cert, --tls-key and --tls-client-ca go with --listen tcp://HOST:PORT")
	}
	return cmp.Or(socket, g.socket()), tcp, nil
}

const tcpScheme = "tcp://"

// tcpAddress reads tcp://HOST:PORT.
func tcpAddress(what, s string) (string, error) {
	address := strings.TrimPrefix(s, tcpScheme)
	host, port, err := net.SplitHostPort(address)
	if err != nil || host == "" || port == "" || strings.Contains(address, "/") {
		return "", usageErrorf("%s %q: write tcp://HOST:PORT", what, s)
	}
	return address, nil
}

// socket is where the service of a root listens.
func (g globals) socket() string {
	_, run := g.dirs()
	return filepath.Join(run, api.SocketName)
}

// socketPath reads unix://PATH.
func socketPath(what, s string) (string, error) {
	p, ok := strings.CutPrefix(s, "unix://")
	if !ok || !path.IsAbs(p) {
		return "", usageErrorf("%s %q: write unix:///PATH or tcp://HOST:PORT", what, s)
	}
	return p, nil
}

func (a *app) serve(
	ctx context.Context, g globals, socket string, svc runtime.Service, more []net.Listener, o serveOptions,
) (err error) {
	served := false
	defer func() {
		for _, l := range more {
			if !served {
				err = errors.Join(err, l.Close())
			}
		}
	}()
	root, run := g.dirs()
	l, err := listener(socket)
	if err == nil && socket == g.socket() {
		err = reachable(root, run)
	}
	if err != nil {
		return &runtime.Error{Op: "serve", Err: err}
	}
	opts := server.Options{
		Turns: o.Turns, Requests: filepath.Join(run, "requests"),
		Info:    api.Info{Version: version, Root: root, Backend: g.Backend},
		Examine: func(ctx context.Context) doctor.Report { return a.examine(ctx, g) },
		Metrics: &server.Metrics{}, Tracer: g.traces.Tracer(),
	}
	if r, ok := svc.(recoverer); ok {
		opts.Before = func(ctx context.Context) error {
			_, err := r.RecoverInterrupted(ctx)
			return errors.Join(err, r.ReviveOfBoot(ctx))
		}
	}
	defer o.tend(ctx, svc, opts.Metrics)()
	h, err := server.New(svc, opts)
	if err != nil {
		return errors.Join(err, l.Close())
	}
	stop := watchdog(h)
	defer stop()
	slog.Info("service listening", "socket", l.Addr().String(), "root", root)
	for _, l := range more {
		slog.Info("service listening", "tcp", l.Addr().String())
	}
	notify(daemon.SdNotifyReady)
	told := make(chan struct{})
	context.AfterFunc(ctx, func() { defer close(told); notify(daemon.SdNotifyStopping) })
	served = true
	err = server.Serve(ctx, l, h, more...)
	if ctx.Err() != nil {
		<-told // or it could end before systemd knows that it was to
	}
	var sig signalError
	if err == nil && errors.As(context.Cause(ctx), &sig) {
		return nil // that is how it ends
	}
	return err
}

// ownPassed keeps the sockets that systemd passes from what we start: a supervisor that
// had one would have connections wait for it for good.
func ownPassed() {
	pid, _ := strconv.Atoi(os.Getenv("LISTEN_PID"))
	n, _ := strconv.Atoi(os.Getenv("LISTEN_FDS"))
	for fd := 3; pid == os.Getpid() && fd < 3+min(n, 16); fd++ {
		syscall.CloseOnExec(fd)
	}
}

// listener is the socket that systemd has made, or one of our own.
func listener(socket string) (*net.UnixListener, error) {
	given, err := activation.Listeners()
	if err != nil {
		return nil, err
	}
	switch {
	case len(given) == 0:
		return server.Listen(socket)
	case len(given) > 1:
		return nil, fmt.Errorf("%w: systemd passes %d sockets, one is expected", runtime.ErrInvalid, len(given))
	}
	l, ok := given[0].(*net.UnixListener)
	if !ok {
		return nil, fmt.Errorf("%w: systemd passes %s, a unix socket is expected", runtime.ErrInvalid,
			given[0].Addr().Network())
	}
	l.SetUnlinkOnClose(false) // it is systemd's
	return l, nil
}

// reachable lets the group of the socket reach it through agentbox's own directories, which only
// root may list.
func reachable(root, run string) error {
	dirs := []string{run}
	if strings.HasPrefix(run, root+"/") {
		dirs = append(dirs, root)
	}
	for _, dir := range dirs {
		info, err := os.Stat(dir)
		if err == nil && info.Mode().Perm()&0o011 != 0o011 {
			err = os.Chmod(dir, info.Mode().Perm()|0o011)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// notify tells systemd how the service is, where systemd has started it.
func notify(state string) {
	if _, err := daemon.SdNotify(false, state); err != nil {
		slog.Error("systemd not notified", "state", state, "err", err)
	}
}

// watchdog tells systemd that the service answers, as often as it asked for.
func watchdog(h *server.Handler) (stop func()) {
	every, err := daemon.SdWatchdogEnabled(false)
	if err != nil || every == 0 {
		return func() {}
	}
	done := make(chan struct{})
	guard.Go(func() {
		tick := time.NewTicker(every / 2)
		defer tick.Stop()
		for {
			select {
			case <-tick.C:
				if err := guard.Do(func() error { return h.Alive(context.Background()) }); err != nil {
					slog.Error("watchdog check failed", "err", err)
					continue
				}
				notify(daemon.SdNotifyWatchdog)
			case <-done:
				return
			}
		}
	})
	return func() { close(done) }
}

// connect finds the service that a command is to use; nil: none, the embedded
// engine. insist: the user named it, so that nothing else will do.
func connect(ctx context.Context, g globals) (svc *api.Client, insist bool, err error) {
	socket := g.socket()
	var c *api.Client
	host := os.Getenv(hostVariable)
	switch {
	case host == noService:
		return nil, false, nil
	case strings.HasPrefix(host, tcpScheme) && !g.rootFlag:
		socket, insist = host, true
		address, err := tcpAddress(hostVariable, host)
		if err == nil {
			c, err = api.DialTLS(address, api.TLSFiles{
				Cert: os.Getenv("AGENTBOX_TLS_CERT"), Key: os.Getenv("AGENTBOX_TLS_KEY"),
				CA: os.Getenv("AGENTBOX_TLS_CA"),
			})
		}
		if err != nil {
			return nil, true, &runtime.Error{
				Op: "service " + host, Err: err,
				Hint: "AGENTBOX_TLS_CERT, AGENTBOX_TLS_KEY and AGENTBOX_TLS_CA name the files.",
			}
		}
	case host != "" && !g.rootFlag:
		if socket, err = socketPath(hostVariable, host); err != nil {
			return nil, true, err
		}
		insist = true
	}
	if _, err := os.Lstat(socket); err != nil && !insist {
		return nil, false, nil
	}
	if c == nil {
		c = api.Dial(socket)
	}
	info, err := ask(ctx, c.Info, func(ctx context.Context) bool { return starting(ctx, socket) })
	if err == nil && g.backendGiven && info.Backend != g.Backend {
		if !insist && os.Geteuid() == 0 {
			return nil, false, c.Close()
		}
		err = usageErrorf("the service makes sandboxes with the backend %s, not %s", info.Backend, g.Backend)
	}
	if err == nil {
		return c, insist, nil
	}
	if errors.Is(err, errSilent) {
		err = &runtime.Error{Op: "service " + socket, Err: err,
			Hint: "It is stopped, or has more to do than it can: look at its log, and end it if need be."}
	}
	err = errors.Join(err, c.Close())
	if insist || os.Geteuid() != 0 || ctx.Err() != nil {
		return nil, true, err
	}
	// Root can do without. One that is gone, or about to be, is nothing to tell.
	if !errors.Is(err, syscall.ECONNREFUSED) && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, runtime.ErrBusy) {
		slog.Warn("service not answering; continuing without it", "err", err)
	}
	return nil, false, nil
}
