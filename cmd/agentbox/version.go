package main

import (
	"bytes"
	"context"
	"io"
	"os/exec"
	goruntime "runtime"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

type versionOptions struct{ Format string }

func (o *versionOptions) addFlags(fl *pflag.FlagSet) {
	addFormat(fl, &o.Format, formatTable, formatJSON)
}

// versions is the documented JSON of `agentbox version`; an empty string is a
// program that is not there.
type versions struct {
	Agentbox string `json:"agentbox"`
	Go       string `json:"go"`
	Runc     string `json:"runc"`
	Criu     string `json:"criu"`
	Conmon   string `json:"conmon"`
}

func newVersionCommand(a *app) *cobra.Command {
	var opts versionOptions
	cmd := &cobra.Command{
		Use:   "version [flags]",
		Short: "Print the versions of agentbox and of what it stands on",
		Long: `Version prints the versions of agentbox, the Go it was built with, runc, criu and conmon. It
needs no root. With --format json the keys are agentbox, go, runc, criu, conmon; a program
that is missing has an empty string.`,
		Example:     "  agentbox version --format json",
		Annotations: exits(exitUsage),
		Args:        args(0, 0),
		RunE: func(cmd *cobra.Command, args []string) error {
			return runVersion(cmd.Context(), opts, a.stdout)
		},
	}
	opts.addFlags(cmd.Flags())
	completeFlags(cmd)
	return cmd
}

func runVersion(ctx context.Context, opts versionOptions, out io.Writer) error {
	v := versions{
		Agentbox: version,
		Go:       goruntime.Version(),
		Runc:     programVersion(ctx, "runc"),
		Criu:     programVersion(ctx, "criu"),
		Conmon:   programVersion(ctx, "conmon"),
	}
	if opts.Format == formatJSON {
		return printJSON(out, v)
	}
	t := newTable(out, "PROGRAM", "VERSION")
	for _, row := range [][2]string{
		{"agentbox", v.Agentbox}, {"go", v.Go}, {"runc", v.Runc}, {"criu", v.Criu}, {"conmon", v.Conmon},
	} {
		if row[1] == "" {
			row[1] = "not found"
		}
		t.row(row[0], row[1])
	}
	return t.flush()
}

// programVersion asks a program for its version: the last word of the first
// line that has a digit in it ("runc version 1.1.5", "Version: 4.1.1").
func programVersion(ctx context.Context, name string) string {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, name, "--version").Output()
	if err != nil {
		return ""
	}
	line, _, _ := bytes.Cut(bytes.TrimSpace(out), []byte("\n"))
	words := strings.Fields(string(line))
	for i := len(words) - 1; i >= 0; i-- {
		if strings.ContainsAny(words[i], "0123456789") {
			return words[i]
		}
	}
	return string(line)
}
