package policy

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/moby/profiles/seccomp"
	specs "github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/internal/fault"
)

// MaxSeccomp bounds a seccomp profile. Docker's own has 16 KiB.
const MaxSeccomp = 256 << 10

// Bounds of what a profile comes to; Docker's own has some 60 rules and 400 names.
const (
	maxSyscallRules = 1024
	maxSyscallNames = 8192
)

// SeccompDigest is how a policy names a profile: by the sha256 of its text.
func SeccompDigest(text string) string {
	sum := sha256.Sum256([]byte(text))
	return "sha256:" + hex.EncodeToString(sum[:])
}

// ParseSeccomp reads a profile in the form that Docker's --security-opt takes. An unknown
// setting, or one that would have no effect here, is an error: a profile that does less than its
// author means is worse than none.
func ParseSeccomp(text string) (*seccomp.Seccomp, error) {
	p, err := parseSeccompProfile(text)
	if err != nil {
		return nil, fmt.Errorf("seccomp profile: %w: %w", fault.ErrInvalid, err)
	}
	return p, nil
}

func parseSeccompProfile(text string) (*seccomp.Seccomp, error) {
	if len(text) > MaxSeccomp {
		return nil, fmt.Errorf("larger than %d bytes", MaxSeccomp)
	}
	if !utf8.ValidString(text) {
		return nil, errors.New("not UTF-8")
	}
	dec := json.NewDecoder(strings.NewReader(text))
	dec.DisallowUnknownFields()
	var p *seccomp.Seccomp
	if err := dec.Decode(&p); err != nil {
		return nil, err
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("there is more after its end")
	}
	switch {
	case p == nil || p.DefaultAction == "":
		return nil, errors.New("it has no defaultAction")
	case len(p.Architectures) > 0 && len(p.ArchMap) > 0:
		return nil, errors.New("architectures and archMap exclude each other")
	case p.ListenerPath != "" || p.ListenerMetadata != "":
		return nil, errors.New("listenerPath is not supported: nothing listens there")
	case len(p.Syscalls) > maxSyscallRules:
		return nil, fmt.Errorf("more than %d rules", maxSyscallRules)
	}
	if err := checkAction(p.DefaultAction); err != nil {
		return nil, err
	}
	names := 0
	for i, rule := range p.Syscalls {
		if err := checkSyscalls(rule); err != nil {
			return nil, fmt.Errorf("syscalls[%d]: %w", i, err)
		}
		names += len(rule.Names)
	}
	if names > maxSyscallNames {
		return nil, fmt.Errorf("more than %d names of system calls", maxSyscallNames)
	}
	return p, nil
}

func checkSyscalls(rule *seccomp.Syscall) error {
	if rule == nil {
		return errors.New("null")
	}
	//lint:ignore SA1019 profiles may have the older form
	if (rule.Name == "") == (len(rule.Names) == 0) || slices.Contains(rule.Names, "") {
		return errors.New("it needs either name or names")
	}
	for _, a := range rule.Args {
		if a.Index > 5 {
			return fmt.Errorf("index %d: a system call has 6 arguments", a.Index)
		}
		if !slices.Contains(seccompOperators, a.Op) {
			return fmt.Errorf("op %.40q is none of %v", a.Op, seccompOperators)
		}
	}
	return checkAction(rule.Action)
}

// checkAction rejects SCMP_ACT_NOTIFY, which asks a supervisor that is never started, and
// SCMP_ACT_TRACE, which asks a debugger.
func checkAction(a specs.LinuxSeccompAction) error {
	if !slices.Contains(seccompActions, a) {
		return fmt.Errorf("action %.40q is none of %v", a, seccompActions)
	}
	return nil
}

var (
	seccompActions = []specs.LinuxSeccompAction{
		specs.ActAllow, specs.ActErrno, specs.ActKill, specs.ActKillProcess, specs.ActKillThread,
		specs.ActLog, specs.ActTrap,
	}
	seccompOperators = []specs.LinuxSeccompOperator{
		specs.OpEqualTo, specs.OpNotEqual, specs.OpGreaterThan, specs.OpGreaterEqual, specs.OpLessThan,
		specs.OpLessEqual, specs.OpMaskedEqual,
	}
)

// allowsSeccomp reports whether a profile is among those allowed. A policy that allows unconfined
// allows any profile.
func (r *Rules) allowsSeccomp(profile string) bool {
	return slices.Contains(r.Seccomp, profile) || digestRE().MatchString(profile) &&
		slices.Contains(r.Seccomp, SeccompUnconfined)
}
