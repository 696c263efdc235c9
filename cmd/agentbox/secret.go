package main

import (
	"path/filepath"
	"strings"

	"github.com/spf13/pflag"

	"github.com/agentbox/agentbox/runtime"
)

// secretOptions are where secrets come from. Their values never pass here.
type secretOptions []string

func (o *secretOptions) addFlags(fl *pflag.FlagSet) {
	fl.Var(list((*[]string)(o)), "secret",
		"a file /run/secrets/NAME, in memory only: `NAME=file:PATH`, NAME=env:VARIABLE, or as docker takes it")
}

func (o secretOptions) parse() (secrets []runtime.Secret, err error) {
	for _, s := range o {
		secret, err := parseSecret(s)
		if err != nil {
			return nil, err
		}
		secrets = append(secrets, secret)
	}
	return secrets, nil
}

// parseSecret reads NAME=file:PATH and NAME=env:VARIABLE, and Docker's
// id=NAME,src=PATH and id=NAME,env=VARIABLE.
func parseSecret(text string) (s runtime.Secret, err error) {
	bad := func(why string) (runtime.Secret, error) {
		return s, usageErrorf("--secret %q: %s; write NAME=file:PATH or NAME=env:VARIABLE", text, why)
	}
	name, from, _ := strings.Cut(text, "=")
	kind, value, found := strings.Cut(from, ":")
	switch {
	case found && kind == "file":
		s.Name, s.File = name, value
	case found && kind == "env":
		s.Name, s.Env = name, value
	case name == "id" || name == "type" || name == "src" || name == "source" || name == "env":
		for field := range strings.SplitSeq(text, ",") {
			switch key, value, _ := strings.Cut(field, "="); key {
			case "id":
				s.Name = value
			case "src", "source":
				s.File = value
			case "env":
				s.Env = value
			case "type": // follows from the others
			default:
				return bad("unknown field " + key)
			}
		}
	default:
		return bad("it does not say where the value comes from")
	}
	switch {
	case s.Name == "":
		return bad("the name is missing")
	case s.File == "" && s.Env == "":
		return bad("it does not say where the value comes from")
	case s.File != "":
		s.File, err = filepath.Abs(s.File)
	}
	return s, err
}
