package bundle

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// The paths of /proc and /sys that Docker 29 masks (moby, daemon/pkg/oci/defaults.go) or makes
// read-only.
var (
	dockerMasks = []string{"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys",
		"/proc/latency_stats", "/proc/sched_debug", "/proc/scsi",
		"/proc/timer_list", "/proc/timer_stats", "/sys/devices/system/cpu/cpu*/thermal_throttle",
		"/sys/devices/virtual/powercap", "/sys/firmware"}
	dockerReadonly = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// firstNamed is the number, the same for all kinds of machines, of the first system call
// that the table has to name even where all agree: those of Linux 5.1 and later.
const firstNamed = 424

// tableOf reads the rows between two comments in docs/security.md.
func tableOf(t *testing.T, name string) (rows [][]string) {
	t.Helper()
	text, err := os.ReadFile("../../../docs/security.md")
	if err != nil {
		t.Fatal(err)
	}
	_, after, ok := strings.Cut(string(text), "<!-- "+name+" begins -->")
	table, _, ok2 := strings.Cut(after, "<!-- "+name+" ends -->")
	if !ok || !ok2 {
		t.Fatalf("docs/security.md has no table of %s", name)
	}
	for line := range strings.Lines(table) {
		if strings.HasPrefix(line, "| `") {
			var cells []string
			for cell := range strings.SplitSeq(strings.Trim(strings.TrimSpace(line), "|"), " | ") {
				cells = append(cells, strings.TrimSpace(cell))
			}
			if len(cells) != 4 || cells[3] == "" {
				t.Fatalf("a row of %s has %d cells, or gives no reason: %s", name, len(cells), line)
			}
			rows = append(rows, cells)
		}
	}
	return rows
}

var quoted = regexp.MustCompile("`([^`]+)`")

// namesIn are the words in backquotes of a cell.
func namesIn(cell string) (list []string) {
	for _, m := range quoted.FindAllStringSubmatch(cell, -1) {
		list = append(list, m[1])
	}
	return list
}

// kernelCalls are the system calls that package unix knows, by name, with their numbers.
func kernelCalls(t *testing.T) map[string]int {
	t.Helper()
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "golang.org/x/sys").Output()
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal(err)
		}
		t.Skip("no Go here: ", err) // as in the virtual machine
	}
	calls := map[string]int{}
	for _, arch := range []string{"amd64", "arm64"} {
		data, err := os.ReadFile(filepath.Join(strings.TrimSpace(string(out)), "unix", "zsysnum_linux_"+arch+".go"))
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`SYS_([A-Z0-9_]+)\s+= (\d+)`).FindAllStringSubmatch(string(data), -1) {
			n, _ := strconv.Atoi(m[2])
			calls[strings.ToLower(m[1])] = n
		}
	}
	delete(calls, "arch_specific_syscall") // a number set apart
	if len(calls) < 350 {
		t.Fatalf("%d calls", len(calls))
	}
	return calls
}

// rulesFor are the rules of a filter for a call.
func rulesFor(f *specs.LinuxSeccomp, name string) (list []specs.LinuxSyscall) {
	for _, rule := range f.Syscalls {
		if slices.Contains(rule.Names, name) {
			rule.Names = []string{name}
			list = append(list, rule)
		}
	}
	return list
}

// said is what a filter does with a call, in a word of the table.
func said(f *specs.LinuxSeccomp, name string) string {
	rules := rulesFor(f, name)
	errno := f.DefaultErrnoRet
	for _, rule := range rules {
		switch {
		case rule.Action == specs.ActAllow && len(rule.Args) == 0:
			return "allowed"
		case rule.Action == specs.ActAllow:
			return "by arguments"
		}
		errno = rule.ErrnoRet
	}
	switch {
	case errno != nil && *errno == 1:
		return "EPERM"
	case errno != nil && *errno == 38:
		return "ENOSYS"
	}
	return fmt.Sprint(rules)
}

// TestCallsBesideDocker holds the table of docs/security.md to what Docker's current profile and
// ours do with every system call: those that either does not allow, that the two treat otherwise,
// and all newer ones are in it. An unknown call fails.
func TestCallsBesideDocker(t *testing.T) {
	filterOf := func(get func(*specs.Spec) (*specs.LinuxSeccomp, error), capabilities []string) *specs.LinuxSeccomp {
		t.Helper()
		names := policy.KernelNames(capabilities)
		f, err := get(&specs.Spec{
			Linux: &specs.Linux{}, Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{
				Bounding: names, Effective: names, Permitted: names,
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		return f
	}
	docker := filterOf(func(s *specs.Spec) (*specs.LinuxSeccomp, error) {
		return seccomp.GetDefaultProfile(s)
	}, policy.DockerCapabilities)
	ours := filterOf(func(s *specs.Spec) (*specs.LinuxSeccomp, error) {
		return SyscallFilter(s, runtime.Security{})
	}, policy.DefaultCapabilities)
	calls := kernelCalls(t)
	decided := map[string][]string{}
	for _, row := range tableOf(t, "calls") {
		for _, name := range namesIn(row[0]) {
			if _, known := calls[name]; !known && len(rulesFor(docker, name)) == 0 {
				t.Errorf("the table has %s, which is no system call", name)
			}
			if decided[name] != nil {
				t.Errorf("the table has %s twice", name)
			}
			decided[name] = row[1:3]
		}
	}
	for _, f := range []*specs.LinuxSeccomp{docker, ours} { // those of other machines, too
		for _, rule := range f.Syscalls {
			for _, name := range rule.Names {
				if _, known := calls[name]; !known {
					calls[name] = 0
				}
			}
		}
	}
	for name, number := range calls {
		theirs, own := said(docker, name), said(ours, name)
		row := decided[name]
		switch {
		case row == nil && (theirs != "allowed" || own != "allowed" || number >= firstNamed):
			t.Errorf("%s (%d) is not decided in docs/security.md: Docker %s, agentbox %s", name, number, theirs, own)
		case row != nil && (row[0] != theirs || row[1] != own):
			t.Errorf("%s: Docker %s, agentbox %s; the table says %s, %s", name, theirs, own, row[0], row[1])
		case theirs == own && !reflect.DeepEqual(rulesFor(docker, name), rulesFor(ours, name)):
			t.Errorf("%s: Docker %+v, agentbox %+v", name, rulesFor(docker, name), rulesFor(ours, name))
		}
	}
}

// TestPathsBesideDocker holds the table of paths to what Docker and a sandbox hide of /proc
// and /sys.
func TestPathsBesideDocker(t *testing.T) {
	state := func(masked, readonly []string, path string) string {
		switch {
		case slices.Contains(masked, path):
			return "masked"
		case slices.Contains(readonly, path):
			return "read-only"
		}
		return "as it is"
	}
	decided := map[string]bool{}
	for _, row := range tableOf(t, "paths") {
		for _, path := range namesIn(row[0]) {
			decided[path] = true
			theirs, own := state(dockerMasks, dockerReadonly, path),
				state(policy.MaskedPaths, policy.ReadonlyPaths, path)
			if row[1] != theirs || row[2] != own {
				t.Errorf("%s: Docker %s, agentbox %s; the table says %s, %s", path, theirs, own, row[1], row[2])
			}
		}
	}
	for _, path := range slices.Concat(dockerMasks, dockerReadonly, policy.MaskedPaths, policy.ReadonlyPaths) {
		if !decided[path] {
			t.Errorf("%s is not decided in docs/security.md", path)
		}
	}
}
