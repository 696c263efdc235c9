package main

import (
	"context"
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"github.com/agentbox/agentbox/runtime"
)

// each runs fn for every name and goes on after an error. It returns all errors
// as an errorList.
func each(ctx context.Context, names []string, fn func(name string) error) error {
	var errs errorList
	for _, name := range names {
		if err := context.Cause(ctx); err != nil {
			errs = append(errs, err)
			break
		}
		if err := fn(name); err != nil {
			errs = append(errs, err)
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return errs
}

// eachNamed is each, and prints every name for which fn succeeded on a line of
// its own.
func eachNamed(ctx context.Context, names []string, out io.Writer, fn func(name string) error) error {
	return each(ctx, names, func(name string) error {
		if err := fn(name); err != nil {
			return err
		}
		_, err := fmt.Fprintln(out, name)
		return err
	})
}

// eachCommand returns the RunE of a command whose arguments are names: verb is
// done to each, and the names are printed.
func (a *app) eachCommand(
	verb func(svc runtime.Service, ctx context.Context, name string) error,
) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		return a.service(ctx, func(svc runtime.Service) error {
			return eachNamed(ctx, args, a.stdout, func(name string) error { return verb(svc, ctx, name) })
		})
	}
}

// inspectEach prints a JSON array of what get returns for each name. Those that
// were found before or after an error are printed too.
func inspectEach[T any](ctx context.Context, names []string, out io.Writer, get func(name string) (T, error)) error {
	found := []T{}
	err := each(ctx, names, func(name string) error {
		v, err := get(name)
		if err == nil {
			found = append(found, v)
		}
		return err
	})
	return both(err, printJSON(out, found))
}
