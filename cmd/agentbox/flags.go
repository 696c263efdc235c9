package main

import (
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// A choiceValue is a flag that takes one of a few words.
type choiceValue struct {
	p     *string
	words []string
}

func choice(p *string, words ...string) pflag.Value { return &choiceValue{p, words} }

func (c *choiceValue) String() string { return *c.p }
func (c *choiceValue) Type() string   { return strings.Join(c.words, "|") }
func (c *choiceValue) Set(s string) error {
	if !slices.Contains(c.words, s) {
		return fmt.Errorf("must be one of %s", strings.Join(c.words, ", "))
	}
	*c.p = s
	return nil
}

// A listValue is a flag that may be given several times. Unlike pflag's it
// never splits at commas, which are ordinary characters in an environment.
type listValue struct{ p *[]string }

func list(p *[]string) pflag.Value { return listValue{p} }

func (l listValue) String() string     { return "" }
func (l listValue) Type() string       { return "list" }
func (l listValue) Set(s string) error { *l.p = append(*l.p, s); return nil }

// Output formats.
const (
	formatTable = "table"
	formatJSON  = "json"
)

// addFormat adds --format; the first word is the default.
func addFormat(fl *pflag.FlagSet, p *string, words ...string) {
	*p = words[0]
	fl.Var(choice(p, words...), "format", "print as `FORMAT`: "+strings.Join(words, " or "))
}

// addIDFormat is addFormat where the plain form is the bare id.
func addIDFormat(fl *pflag.FlagSet, p *string) {
	*p = "id"
	fl.Var(choice(p, "id", formatJSON), "format", "print as `FORMAT`: id or json")
}

// completeFlags registers the words of choice flags with the shell completion.
func completeFlags(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		if c, ok := f.Value.(*choiceValue); ok {
			// It fails only for a flag registered twice.
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions(c.words,
				cobra.ShellCompDirectiveNoFileComp))
		} else if f.Name == everyFlag {
			_ = cmd.RegisterFlagCompletionFunc(f.Name, cobra.FixedCompletions([]string{"exec", "10m", "exec,10m"},
				cobra.ShellCompDirectiveNoFileComp))
		}
	})
}

// oneForm refuses two answers to how to print.
func oneForm(quiet bool, format string) error {
	if quiet && format == formatJSON {
		return usageErrorf("--quiet and --format json exclude each other")
	}
	return nil
}
