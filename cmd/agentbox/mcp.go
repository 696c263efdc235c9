package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/mcp"
)

// tokenVariable has the token of the server over HTTP.
const tokenVariable = "AGENTBOX_MCP_TOKEN"

type mcpOptions struct {
	Listen      string
	TokenFile   string
	NoToken     bool
	AllowRemote bool
	Origins     []string

	ReadOnly     bool
	NoRestore    bool
	Every        string
	WholeSandbox bool

	AllowCreate  bool
	Images       []string
	MaxSandboxes int
	MaxKept      int
	MaxBytes     string
	Keep         bool
	create       createOptions // of which flags set a few
}

// everyTool is the word of --checkpoint-every.
const everyTool = "tool"

func (o *mcpOptions) addFlags(fl *pflag.FlagSet) {
	fl.StringVar(&o.Listen, "listen", "",
		"serve HTTP on `ADDRESS`, 127.0.0.1:PORT or unix:///PATH, instead of stdin and stdout")
	fl.StringVar(&o.TokenFile, "token-file", "", "`FILE` with the bearer token of HTTP clients (default: environment "+
		tokenVariable+", or one is made up and printed)")
	fl.BoolVar(&o.NoToken, "no-token", false, "let everybody in who reaches the address")
	fl.BoolVar(&o.AllowRemote, "allow-remote", false, "listen on an address that other hosts reach, unencrypted")
	fl.Var(list(&o.Origins), "allow-origin", "web pages of this `ORIGIN` may connect; others may not")

	fl.BoolVar(&o.ReadOnly, "read-only", false, "give only the tools that change nothing")
	fl.BoolVar(&o.NoRestore, "no-restore", false, "leave restore to you")
	fl.Var(choice(&o.Every, everyTool), "checkpoint-every",
		"take a checkpoint before each call that may change something: tool")
	fl.BoolVar(&o.WholeSandbox, "whole-sandbox", false, "let file tools leave the working directory")

	fl.BoolVar(&o.AllowCreate, "allow-create", false, "let the agent make sandboxes")
	fl.Var(list(&o.Images), "image", "`IMAGE` that it may make them of, the first being the default; none: all")
	fl.IntVar(&o.MaxSandboxes, "max-sandboxes", 8, "sandboxes and forks that it may have at a time")
	fl.IntVar(&o.MaxKept, "max-checkpoints", 100,
		"keep this `NUMBER` of checkpoints that agents took of each sandbox; the oldest go")
	fl.StringVar(&o.MaxBytes, "max-checkpoint-bytes", "20g", "keep as many of them as take this `SIZE`")
	fl.BoolVar(&o.Keep, "keep", false, "keep the sandboxes and forks that it made when the session ends")
	fl.StringVarP(&o.create.Memory, "memory", "m", "", "memory limit `SIZE` of those it makes")
	fl.StringVar(&o.create.CPUs, "cpus", "", "limit to this `NUMBER` of cores of those it makes")
	fl.Int64Var(&o.create.Pids, "pids-limit", 0, "limit to this `NUMBER` of processes of those it makes; -1: none")
	fl.Var(choice(&o.create.Network, runtime.NetworkNone, runtime.NetworkBridge, runtime.NetworkFiltered), "network",
		"`MODE` of those it makes: none (only lo), bridge, or filtered (out only by --egress); default: the policy's, bridge")
	fl.Var(list(&o.create.Egress), "egress",
		"let those it makes out to `RULE` only, as 'agentbox run --egress' takes it")
	fl.Var(list(&o.create.Workspaces), "workspace",
		"show those it makes the host directory `DIR[:PATH][:ro]`, which each changes for itself alone")
	o.create.addMaxFiles(fl)
	fl.StringVarP(&o.create.Workdir, "workdir", "w", "", "working directory `DIR` in those it makes")
	fl.StringVarP(&o.create.User, "user", "u", "", "`USER[:GROUP]` in those it makes")
	fl.VarP(list(&o.create.Env), "env", "e", "set `NAME=VALUE` in those it makes; NAME alone takes the caller's value")
}

// parse turns the flags and [SANDBOX] into what the server takes.
func (o *mcpOptions) parse(args []string) (mcp.Options, error) {
	opts := mcp.Options{
		ReadOnly: o.ReadOnly, NoRestore: o.NoRestore, CheckpointEvery: o.Every == everyTool,
		WholeSandbox: o.WholeSandbox,
		Keep:         o.Keep, MaxSandboxes: o.MaxSandboxes, MaxCheckpoints: o.MaxKept, Version: version,
	}
	var err error
	if opts.MaxCheckpointBytes, err = parseSize("--max-checkpoint-bytes", o.MaxBytes); err != nil {
		return opts, err
	}
	switch {
	case len(args) == 1:
		opts.Sandbox = args[0]
	case !o.AllowCreate:
		return opts, usageErrorf("name a SANDBOX, or give --allow-create")
	}
	switch {
	case o.AllowCreate && o.ReadOnly:
		return opts, usageErrorf("--allow-create and --read-only exclude each other")
	case len(o.Images) > 0 && !o.AllowCreate:
		return opts, usageErrorf("--image needs --allow-create")
	case o.MaxSandboxes < 1 || o.MaxSandboxes > maxForks:
		return opts, usageErrorf("--max-sandboxes %d: must be from 1 to %d", o.MaxSandboxes, maxForks)
	case o.MaxKept < 1:
		return opts, usageErrorf("--max-checkpoints %d: must be 1 or more", o.MaxKept)
	case opts.MaxCheckpointBytes < 1:
		return opts, usageErrorf("--max-checkpoint-bytes %s: must be 1 or more", o.MaxBytes)
	case o.Listen == "" && (o.TokenFile != "" || o.NoToken || o.AllowRemote || len(o.Origins) > 0):
		return opts, usageErrorf("--token-file, --no-token, --allow-remote and --allow-origin need --listen")
	case o.TokenFile != "" && o.NoToken:
		return opts, usageErrorf("--token-file and --no-token exclude each other")
	}
	if o.AllowCreate {
		request := func(image string) (runtime.CreateRequest, error) { return o.create.request([]string{image}) }
		if _, err := request("image"); err != nil {
			return opts, err
		}
		opts.Create = &mcp.CreateOptions{Request: request, Images: o.Images}
	}
	if o.Listen != "" {
		return opts, o.checkListen()
	}
	return opts, nil
}

// checkListen refuses what other hosts could reach, unless that is wanted.
func (o *mcpOptions) checkListen() error {
	if socket, ok := strings.CutPrefix(o.Listen, "unix://"); ok {
		if !path.IsAbs(socket) {
			return usageErrorf("--listen %q: write unix:///PATH", o.Listen)
		}
		return nil
	}
	addr, err := netip.ParseAddrPort(o.Listen)
	switch {
	case err != nil:
		return usageErrorf("--listen %q: write 127.0.0.1:PORT, [::1]:PORT or unix:///PATH", o.Listen)
	case !addr.Addr().IsLoopback() && !o.AllowRemote:
		return usageErrorf("--listen %s: other hosts can reach it, and what they send is not encrypted; give --allow-remote if that is what you want", o.Listen)
	case !addr.Addr().IsLoopback() && o.NoToken:
		return usageErrorf("--no-token is for addresses that only this host reaches")
	}
	return nil
}

func newMCPCommand(a *app) *cobra.Command {
	var opts mcpOptions
	cmd := &cobra.Command{
		Use:   "mcp [flags] [SANDBOX]",
		Short: "Give an agent tools that act in a sandbox (Model Context Protocol)",
		Long: `Mcp serves the Model Context Protocol on stdin and stdout, as Claude Code, Codex, Cursor and
others start it: an agent gets tools that run commands and work on files in SANDBOX, and take
and restore its checkpoints, and none that reach the host.

File tools stay in the sandbox's working directory; a path that leads out of it is refused
with an error that says where the agent is. With --allow-create the agent can make sandboxes,
and sees no others. What it made or forked, and the commands it left running, end with the
session: when stdin closes, or the server is stopped.

With --listen it serves HTTP at /mcp, to callers with the token, until it is stopped.`,
		Example: `  agentbox mcp c
  agentbox mcp --checkpoint-every tool --no-restore c
  agentbox mcp --allow-create --image busybox --network none
  agentbox mcp --allow-create --image debian --workspace .:/work --workdir /work
  agentbox mcp --listen 127.0.0.1:8765 c
  claude mcp add box -- sudo agentbox mcp c`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: a.completeOneSandbox(nil),
		RunE: func(cmd *cobra.Command, args []string) error {
			mo, err := opts.parse(args)
			if err != nil {
				return err
			}
			mo.Log = slog.Default()
			a.globals.by = "mcp"
			return a.engine(cmd.Context(), func(svc runtime.Service) error {
				return a.runMCP(cmd.Context(), opts, mo, svc)
			})
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func (a *app) runMCP(ctx context.Context, opts mcpOptions, mo mcp.Options, svc runtime.Service) (err error) {
	if opts.Listen == "" && isTerminal(a.stdin) {
		fmt.Fprintln(a.stderr, "agentbox: this is for a program to speak with, in the Model Context Protocol, on stdin and stdout")
	}
	local, ok := svc.(runtime.Local)
	if !ok {
		return fmt.Errorf("mcp: %w", runtime.ErrUnsupported)
	}
	// Directories that tools make in a sandbox are as its users expect them.
	syscall.Umask(0o022)
	server, err := mcp.New(ctx, local, mo)
	if err != nil {
		return reword(err, "mcp", mo.Sandbox)
	}
	defer func() { err = both(err, server.Close(ctx)) }()
	if opts.Listen == "" {
		return server.ServeStream(ctx, a.stdin, a.stdout)
	}
	return a.listenMCP(ctx, opts, server)
}

func (a *app) listenMCP(ctx context.Context, opts mcpOptions, server *mcp.Server) error {
	ho := mcp.HTTPOptions{Origins: opts.Origins}
	socket, local := strings.CutPrefix(opts.Listen, "unix://")
	token, made, err := opts.token(local)
	if err != nil {
		return err
	}
	ho.Token = token
	var l net.Listener
	if local {
		l, err = listenUnix(socket)
	} else {
		l, err = net.Listen("tcp", opts.Listen)
	}
	if err != nil {
		return &runtime.Error{Op: "mcp", Err: fmt.Errorf("listen on %s: %w", opts.Listen, err)}
	}
	where := "http://" + l.Addr().String() + mcp.Endpoint
	if local {
		where = opts.Listen + " (path " + mcp.Endpoint + ")"
	}
	fmt.Fprintf(a.stderr, "agentbox: listening on %s\n", where)
	if made {
		fmt.Fprintf(a.stderr, "agentbox: clients send the header: Authorization: Bearer %s\n", token)
	}
	return server.ServeHTTP(ctx, l, ho)
}

// token is what clients must send. A socket has its mode instead, unless a token
// was given.
func (o *mcpOptions) token(local bool) (token string, made bool, err error) {
	if o.NoToken {
		return "", false, nil
	}
	token = os.Getenv(tokenVariable)
	if o.TokenFile != "" {
		data, err := os.ReadFile(o.TokenFile)
		if err != nil {
			return "", false, usageErrorf("--token-file: %v", err)
		}
		token = string(data)
	}
	token = strings.TrimSpace(token)
	switch {
	case token != "":
		return token, false, nil
	case o.TokenFile != "":
		return "", false, usageErrorf("--token-file %s: it is empty", o.TokenFile)
	case local:
		return "", false, nil
	}
	return rand.Text(), true, nil
}

// listenUnix makes a socket that only its owner can connect to, in the place of one that no
// server listens on any more.
func listenUnix(name string) (net.Listener, error) {
	if fi, err := os.Lstat(name); err == nil && fi.Mode()&os.ModeSocket != 0 {
		conn, err := net.Dial("unix", name)
		if err == nil {
			return nil, errors.Join(fmt.Errorf("%w: a server listens there", runtime.ErrExists), conn.Close())
		}
		if errors.Is(err, syscall.ECONNREFUSED) {
			if err := os.Remove(name); err != nil {
				return nil, err
			}
		}
	}
	// From its first moment; nothing else makes files meanwhile.
	mask := syscall.Umask(0o177)
	defer syscall.Umask(mask)
	return net.Listen("unix", name)
}
