package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"golang.org/x/term"

	"github.com/agentbox/agentbox/images/image"
	"github.com/agentbox/agentbox/images/source"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/audit"
)

type imageLoginOptions struct {
	transferOptions
	User  string
	Stdin bool
}

func newImageLoginCommand(a *app) *cobra.Command {
	var opts imageLoginOptions
	cmd := &cobra.Command{
		Use:   "login [flags] [REGISTRY]",
		Short: "Keep the credentials for a registry",
		Long: `Login asks a registry (HOST[:PORT]; default: Docker Hub) whether it takes a user and a password,
and keeps them where 'docker login' would: in the configuration file of Docker, or with the
credential helper that it names. They are for this user's commands: the service has those of
its own user, root. Without --password-stdin it asks for them on the terminal.`,
		Example: `  agentbox image login registry.example.com
  agentbox image login -u ci --password-stdin registry.example.com < token`,
		Annotations:       exits(exitUsage, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			registry := ""
			if len(args) > 0 {
				registry = args[0]
			}
			if opts.Stdin && opts.User == "" {
				return usageErrorf("--password-stdin needs --username")
			}
			if !opts.Stdin && !isTerminal(a.stdin) {
				return usageErrorf("stdin is no terminal to ask for a password on: give --username and --password-stdin")
			}
			return a.runImageLogin(cmd.Context(), registry, opts)
		},
	}
	fl := cmd.Flags()
	opts.addFlags(fl)
	fl.StringVarP(&opts.User, "username", "u", "", "`NAME` of the user")
	fl.BoolVar(&opts.Stdin, "password-stdin", false, "read the password from stdin")
	completeFlags(cmd)
	return cmd
}

// maxPassword bounds what is read of stdin.
const maxPassword = 1 << 20

func (a *app) runImageLogin(ctx context.Context, registry string, opts imageLoginOptions) error {
	stdin, stderr := a.stdin, a.stderr
	user := opts.User
	var password string
	if opts.Stdin {
		b, err := io.ReadAll(io.LimitReader(stdin, maxPassword))
		if err != nil {
			return err
		}
		password = strings.TrimRight(string(b), "\r\n")
	} else {
		if user == "" {
			fmt.Fprint(stderr, "Username: ")
			line, err := bufio.NewReader(stdin).ReadString('\n')
			if err != nil && !errors.Is(err, io.EOF) {
				return err
			}
			user = strings.TrimSpace(line)
		}
		fmt.Fprint(stderr, "Password: ")
		b, err := term.ReadPassword(int(stdin.Fd()))
		fmt.Fprintln(stderr)
		if err != nil {
			return err
		}
		password = string(b)
	}
	var where string
	err := a.onRecord(audit.Record{Verb: "image login", Ref: audit.Clip(registry)}, func(*audit.Record) (err error) {
		where, err = source.Login(ctx, registry, user, password, opts.source())
		return err
	})
	if err != nil {
		return &runtime.Error{Op: "image login", ID: registry, Err: err}
	}
	if _, err = fmt.Fprintf(a.stdout, "Logged in; kept in %s\n", where); err == nil && os.Geteuid() != 0 {
		_, err = fmt.Fprintln(stderr,
			"note: the service pulls and pushes with its own user's credentials, not with these: for those log in as root")
	}
	return err
}

func newImageLogoutCommand(a *app) *cobra.Command {
	var authFile string
	cmd := &cobra.Command{
		Use:               "logout [flags] [REGISTRY]",
		Short:             "Forget the credentials for a registry",
		Long:              "Logout forgets what 'image login' or 'docker login' keeps for a registry (default: Docker Hub).",
		Example:           "  agentbox image logout registry.example.com",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied),
		Args:              args(0, 1),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, args []string) error {
			registry := ""
			if len(args) > 0 {
				registry = args[0]
			}
			err := a.onRecord(audit.Record{Verb: "image logout", Ref: audit.Clip(registry)}, func(*audit.Record) error {
				return source.Logout(cmd.Context(), registry, image.SourceOptions{AuthFile: authFile})
			})
			if err != nil {
				return &runtime.Error{Op: "image logout", ID: registry, Err: err}
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&authFile, "authfile", "", "`FILE` with credentials; default: that of 'docker login'")
	return cmd
}
