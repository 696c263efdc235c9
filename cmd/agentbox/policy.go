package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/engine"
	"github.com/agentbox/agentbox/runtime/local"
)

func (g globals) policies() policy.Finder { return local.Policies(g.Root) }

// policies are those of the service of this host when there is one: it may be
// that only it can read them.
type policies interface {
	List() ([]runtime.PolicyEntry, error)
	Find(name string) (*policy.Policy, error)
	Load(file string) (*policy.Policy, error)
}

// ownPolicies are those that this process finds.
type ownPolicies struct{ policy.Finder }

func (p ownPolicies) List() ([]runtime.PolicyEntry, error) { return engine.ListPolicies(p.Finder) }

// servicePolicies are those of a service. Files are this process's, and what they
// narrow is the service's.
type servicePolicies struct {
	ctx context.Context
	svc runtime.HostService
}

func (p servicePolicies) List() ([]runtime.PolicyEntry, error) { return p.svc.Policies(p.ctx) }
func (p servicePolicies) Find(name string) (*policy.Policy, error) {
	return p.svc.Policy(p.ctx, name)
}
func (p servicePolicies) Load(file string) (*policy.Policy, error) {
	return policy.Finder{Base: p.Find}.Load(file)
}

// policies runs fn with those of this host.
func (a *app) policies(ctx context.Context, fn func(policies) error) error {
	g, err := a.globals.resolve()
	if err != nil {
		return err
	}
	if a.connect != nil {
		svc, _, err := a.connect(ctx, g)
		if err != nil {
			return err
		}
		if svc != nil {
			err := fn(servicePolicies{ctx, svc})
			if cerr := svc.Close(); err == nil {
				err = cerr
			}
			return err
		}
	}
	return fn(ownPolicies{g.policies()})
}

// policy finds one.
func (a *app) policy(ctx context.Context, name string) (p *policy.Policy, err error) {
	err = a.policies(ctx, func(find policies) error {
		p, err = findPolicy(find, name)
		return err
	})
	return p, err
}

// findPolicy resolves NAME|FILE: what could be a name is one.
func findPolicy(find policies, name string) (*policy.Policy, error) {
	if strings.Contains(name, "/") || strings.HasSuffix(name, ".yaml") || strings.HasSuffix(name, ".yml") {
		return find.Load(name)
	}
	return find.Find(name)
}

func newPolicyCommand(a *app) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy COMMAND",
		Short: "Policies: what sandboxes may do",
		Long: `A policy says in one YAML file what a sandbox may do: its image, mounts, user, capabilities,
network, limits and checkpoints. It narrows another one, its base, and never allows more.
Built in are trusted (all there is), default, and strict. Others are NAME.yaml in
ROOT/policies and in ` + local.HostPolicies + `, or files named with a slash. One called
default.yaml there is the policy of sandboxes for which nobody names one.`,
		Example: `  agentbox policy ls
  agentbox policy check ./agent.yaml
  agentbox policy explain strict --privileged
  agentbox run --policy ./agent.yaml busybox sh`,
		Annotations: exits(exitUsage),
		Args:        cobra.ArbitraryArgs,
		RunE:        helpOrUnknown,
	}
	cmd.AddCommand(newPolicyLsCommand(a), newPolicyShowCommand(a), newPolicyCheckCommand(a), newPolicyExplainCommand(a),
		newPolicySchemaCommand(a))
	return cmd
}

func newPolicyLsCommand(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:     "ls [flags]",
		Aliases: []string{"list"},
		Short:   "List the policies that names stand for",
		Long: `Ls lists every policy that can be named, what it narrows, and where it stands. With --format
json it prints an array of objects: name, base (the nearest first), file, description, digest,
error (what is wrong with it; empty: nothing).`,
		Example:           "  agentbox policy ls --format json",
		Annotations:       exits(exitUsage),
		Args:              args(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.policies(cmd.Context(), func(find policies) error { return runPolicyLs(find, format, a.stdout) })
		},
	}
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func runPolicyLs(find policies, format string, out io.Writer) error {
	list, err := find.List()
	if err != nil {
		return err
	}
	return listing[runtime.PolicyEntry]{
		format: format,
		header: []string{"NAME", "BASE", "FILE", "DESCRIPTION"},
		row: func(e runtime.PolicyEntry) []string {
			text := e.Description
			if e.Error != "" {
				first, _, _ := strings.Cut(e.Error, "\n")
				text = "wrong: " + first
			}
			return []string{e.Name, strings.Join(e.Base, " < "), e.File, text}
		},
	}.print(out, list)
}

func newPolicyShowCommand(a *app) *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "show [flags] NAME|FILE",
		Short: "Print a policy with all that it inherits",
		Long: `Show prints a policy with all that its bases leave to it, as a policy file that says the same
by itself over trusted. With --format json it prints one object: name, base, file, description,
digest, rules (the same in JSON).`,
		Example:           "  agentbox policy show strict",
		Annotations:       exits(exitUsage, exitNotFound, exitDenied, exitUnsupported),
		Args:              args(1, 1),
		ValidArgsFunction: a.completeOnePolicy,
		RunE: func(cmd *cobra.Command, args []string) error {
			p, err := a.policy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			return runPolicyShow(p, format, a.stdout)
		},
	}
	addFormat(cmd.Flags(), &format, "yaml", formatJSON)
	completeFlags(cmd)
	return cmd
}

func runPolicyShow(p *policy.Policy, format string, out io.Writer) error {
	tree := p.Rules.Tree()
	if format == formatJSON {
		return printJSON(out, map[string]any{
			"name": p.Name, "base": notNull(p.Base), "file": p.File, "description": p.Description,
			"digest": p.Rules.Digest(), "rules": tree,
		})
	}
	var text bytes.Buffer
	fmt.Fprintf(&text, "# %s, %s\n", p.Name, p.Rules.Digest())
	if len(p.Base) > 0 {
		fmt.Fprintf(&text, "# with what it inherits from %s\n", strings.Join(p.Base, ", "))
	}
	tree["base"] = "trusted"
	if p.Description != "" {
		tree["description"] = p.Description
	}
	enc := yaml.NewEncoder(&text)
	enc.SetIndent(2)
	if err := enc.Encode(tree); err != nil {
		return err
	}
	_, err := out.Write(text.Bytes())
	return err
}

func newPolicyCheckCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "check NAME|FILE...",
		Short: "Say all that is wrong with policies",
		Long: `Check reads policies and reports all that is wrong with each, as FILE:LINE:COLUMN: unknown
keys, impossible values, what is not supported yet, and what is wider than the base.`,
		Example:     "  agentbox policy check ./agent.yaml",
		Annotations: exits(exitUsage, exitNotFound, exitDenied, exitUnsupported),
		Args:        args(1, -1),
		ValidArgsFunction: func(cmd *cobra.Command, given []string, _ string) ([]string, cobra.ShellCompDirective) {
			return a.policyNames(cmd.Context(), given), cobra.ShellCompDirectiveDefault
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.policies(cmd.Context(), func(find policies) error {
				return each(cmd.Context(), args, func(name string) error {
					p, err := findPolicy(find, name)
					if err != nil {
						return err
					}
					_, err = fmt.Fprintf(a.stdout, "%s: good, %s\n", name, p.Rules.Digest())
					return err
				})
			})
		},
	}
}

func newPolicySchemaCommand(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "schema",
		Short: "Print the JSON Schema of policy files",
		Long: `Schema prints the JSON Schema of policy files, for editors. A file names it in a first line
'# yaml-language-server: $schema=FILE'.`,
		Example:           "  agentbox policy schema > policy.schema.json",
		Annotations:       exits(exitUsage),
		Args:              args(0, 0),
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE: func(*cobra.Command, []string) error {
			_, err := a.stdout.Write(policy.Schema)
			return err
		},
	}
}

func newPolicyExplainCommand(a *app) *cobra.Command {
	var opts createOptions
	var format string
	cmd := &cobra.Command{
		Use:   "explain [flags] NAME|FILE [flags of run] [IMAGE]",
		Short: "Say what a policy makes of the flags of run, and by which rule",
		Long: `Explain takes the flags of 'agentbox run' and says of each thing that they ask for, and of
what a sandbox gets unasked, whether it is allowed, denied, or clamped: nobody asked for it, and
it is what the rule leaves. RULE is the key and what it says, WHERE the policy and the line.
Nothing is pulled and nothing made: what the image itself asks for, its user for one, is not
known here. With --format json it prints an array of objects: verdict, what, rule, origin
(policy, file, line), why, hint.`,
		Example: `  agentbox policy explain strict --privileged
  agentbox policy explain ./agent.yaml -v ./src:/src --memory 8g debian:12`,
		Annotations:       exits(exitUsage, exitNotFound, exitDenied, exitUnsupported),
		Args:              args(1, 2),
		ValidArgsFunction: a.completeOnePolicy,
		RunE: func(cmd *cobra.Command, args []string) error {
			if opts.Policy != "" {
				return usageErrorf("the policy is the first argument, not --policy")
			}
			p, err := a.policy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			req, err := opts.request(append(args[1:], "")[:1])
			if err != nil {
				return err
			}
			_, findings := p.Judge(engine.PolicyRequest(req))
			return runPolicyExplain(findings, format, a.stdout)
		},
	}
	opts.addFlags(cmd.Flags())
	addFormat(cmd.Flags(), &format, formatTable, formatJSON)
	completeFlags(cmd)
	return cmd
}

func runPolicyExplain(findings []policy.Finding, format string, out io.Writer) error {
	if format == formatJSON {
		if err := printJSON(out, notNull(findings)); err != nil {
			return err
		}
	} else {
		t := newTable(out, "VERDICT", "WHAT", "RULE", "WHERE")
		for _, f := range findings {
			rule := f.Rule
			if f.Why != "" {
				rule += " (" + f.Why + ")"
			}
			t.row(f.Verdict, printable(f.What), printable(rule), f.Origin.Where())
		}
		if err := t.flush(); err != nil {
			return err
		}
		hints := map[string]bool{}
		for _, f := range findings {
			if f.Verdict == policy.Denied && f.Hint != "" {
				hints[f.Hint] = true
			}
		}
		for _, h := range slices.Sorted(maps.Keys(hints)) {
			if _, err := fmt.Fprintln(out, "hint: "+printable(h)); err != nil {
				return err
			}
		}
	}
	if policy.Denials(findings) != nil {
		return exitStatus(exitDenied)
	}
	return nil
}

// policyNames completes the names of policies that are not given yet.
func (a *app) policyNames(ctx context.Context, given []string) (names []string) {
	_ = a.policies(ctx, func(find policies) error { // a completion cannot report errors
		list, err := find.List()
		for _, p := range list {
			if !slices.Contains(given, p.Name) {
				names = append(names, cobra.CompletionWithDesc(p.Name, p.Description))
			}
		}
		return err
	})
	return names
}

func (a *app) completeOnePolicy(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, noFiles
	}
	return a.policyNames(cmd.Context(), nil), cobra.ShellCompDirectiveDefault
}

// completePolicyFlag registers the names of policies for --policy.
func (a *app) completePolicyFlag(cmd *cobra.Command) {
	// It fails only for a flag registered twice.
	_ = cmd.RegisterFlagCompletionFunc("policy", func(cmd *cobra.Command, _ []string, _ string) ([]string,
		cobra.ShellCompDirective) {
		return a.policyNames(cmd.Context(), nil), cobra.ShellCompDirectiveDefault
	})
}
