// Package imports has the table of which package may import which, and the tests that hold
// the code to it, and the map in docs/architecture.md to both.
package imports

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/agentbox/agentbox/"

// allowed lists, per package, which packages of this module it may import directly. A package
// that is not listed may import none of ours.
var allowed = map[string][]string{
	"cmd/agentbox": {"internal/cptar", "internal/fault", "internal/guard", "internal/gclater", "internal/lazy",
		"internal/setup", "images/image", "images/reference", "images/source", "internal/project", "internal/rights",
		"policy", "runtime", "runtime/engine", "runtime/api",
		"runtime/audit", "runtime/containerd", "internal/exitcode",
		"runtime/doctor", "runtime/group", "runtime/local", "runtime/mcp", "runtime/oci", "runtime/traces",
		"runtime/volume", "internal/fsx", "runtime/doctor/checks", "runtime/api/server"},
	"cmd/docker-agentbox": {
		"internal/exitcode", "internal/fault", "internal/setup", "runtime", "runtime/audit", "runtime/dockerplugin",
		"runtime/dockerplugin/authz", "runtime/dockerplugin/volume", "runtime/volume",
	},
	"cmd/agentbox-runtime": {
		"criu/crlog", "criu/cut", "criu/freezer", "criu/host", "criu/lsm", "criu/proof", "criu/stage", "criu/wall",
		"internal/fault", "internal/fsx", "internal/proc",
	},
	"criu": {
		"criu/crlog", "criu/cut", "criu/freezer", "criu/host", "criu/proof", "internal/fault", "internal/guard",
		"internal/failpoint", "internal/fsx", "internal/proc",
	},
	"criu/crlog":    {"internal/fsx"},
	"criu/criutest": {"criu/host"},
	"criu/cut":      {},
	"criu/freezer":  {"internal/failpoint", "internal/fault", "internal/guard", "internal/proc"},
	"criu/host":     {"internal/fault", "internal/guard", "internal/fsx", "internal/proc"},
	"criu/lsm":      {"criu/host", "internal/fault"},
	"criu/proof": {
		"criu/freezer", "internal/failpoint", "internal/fault", "internal/guard", "internal/fsx", "internal/proc",
	},
	"criu/stage":         {"internal/fault", "internal/fsx", "internal/flock"},
	"criu/wall":          {"criu/host", "internal/fault", "internal/proc"},
	"criu/wall/walltest": {},
	"dist/deb/linked":    {},
	"dist/systemd":       {},
	"images": {
		"images/image", "images/layer", "images/source", "internal/cptar/tree", "internal/fault", "internal/guard",
		"internal/lazy", "internal/failpoint", "internal/flock", "internal/fsx", "images/reference",
	},
	"images/build":     {"internal/fault", "internal/lazy"},
	"images/image":     {},
	"images/reference": {"internal/fault", "internal/lazy"},
	"images/layer":     {"internal/cptar/tree", "internal/fault", "internal/guard"},
	"images/source": {
		"images/image", "internal/fault", "internal/guard", "internal/lazy", "internal/remote", "internal/flock",
		"internal/fsx", "images/reference",
	},
	"internal/cptar":      {"internal/cptar/tree", "internal/fault", "policy", "internal/idmap"},
	"internal/cptar/tree": {"internal/fault", "internal/idmap"},
	"internal/enginetest": {"internal/thorough"},
	"internal/exitcode":   {"internal/fault"},
	"internal/failpoint":  {},
	"internal/fault":      {},
	"internal/flock":      {},
	"internal/fsx":        {},
	"internal/gclater":    {},
	"internal/guard":      {},
	"internal/hostfile":   {"internal/fault", "overlay"},
	"internal/idmap":      {"internal/fault", "internal/guard"},
	"internal/imports":    {},
	"internal/lazy":       {},
	"internal/proc":       {},
	"internal/project":    {"internal/fault", "internal/lazy", "policy"},
	"internal/remote":     {"internal/fault"},
	"internal/rights":     {},
	"internal/setup":      {"dist/systemd", "internal/fault", "internal/lazy", "internal/flock", "internal/fsx"},
	"internal/thorough":   {},
	"internal/undo":       {},
	"overlay":             {"internal/fault", "internal/guard", "internal/failpoint", "internal/idmap"},
	"policy":              {"internal/fault", "internal/lazy"},
	"runtime": {
		"criu/stage", "images/image", "internal/fault", "internal/fsx", "internal/idmap", "policy",
	},
	"runtime/engine": {
		"runtime", "criu", "criu/proof", "criu/stage", "images", "images/build", "images/image", "images/source",
		"internal/cptar", "internal/failpoint", "internal/hostfile", "internal/lazy", "internal/fault",
		"internal/guard", "internal/undo", "overlay", "policy", "runtime/eventlog", "runtime/network/egress",
		"runtime/portable", "runtime/registry", "runtime/engine/progress", "runtime/engine/worktree", "runtime/store",
		"internal/idmap", "runtime/internal/changes", "runtime/internal/kernel", "runtime/internal/record",
		"internal/flock", "internal/fsx", "internal/rights", "images/reference", "runtime/internal/apply",
		"runtime/internal/streams", "internal/project",
	},
	"runtime/backendtest": {"criu", "criu/stage", "runtime", "internal/idmap"},
	"runtime/api": {
		"images/image", "images/reference", "internal/guard", "policy", "runtime", "runtime/api/wire", "runtime/doctor",
	},
	"runtime/api/server": {
		"images/image", "internal/fault", "internal/flock", "internal/fsx", "internal/guard", "policy", "runtime",
		"runtime/api/wire", "runtime/doctor",
	},
	"runtime/api/wire": {"images/image", "internal/fault", "runtime"},
	"runtime/local": {
		"images", "images/image", "images/source", "internal/fault", "internal/guard", "policy", "runtime",
		"runtime/audit", "runtime/containerd", "runtime/docker", "runtime/engine", "runtime/oci", "runtime/podman",
		"runtime/store", "runtime/volume",
	},
	"runtime/audit": {
		"internal/failpoint", "internal/fault", "internal/guard", "internal/lazy", "runtime",
		"internal/flock", "internal/fsx",
	},
	"runtime/containerd": {"criu", "criu/stage", "images", "images/image", "internal/cptar/tree", "internal/failpoint",
		"internal/fault", "internal/guard", "internal/lazy", "internal/undo", "runtime",
		"runtime/internal/bundle", "runtime/internal/kernel", "runtime/internal/record", "runtime/internal/streams",
		"runtime/internal/box", "internal/flock", "images/reference"},
	"runtime/docker": {
		"criu", "criu/host", "criu/lsm", "criu/stage", "images/image", "internal/failpoint", "internal/fault",
		"internal/guard", "internal/lazy", "internal/undo", "overlay", "policy", "runtime", "runtime/internal/bundle",
		"runtime/internal/kernel", "runtime/internal/record", "runtime/internal/streams", "runtime/internal/apparmor",
		"internal/flock", "internal/proc", "images/reference",
	},
	"runtime/dockerplugin":        {"internal/fault", "internal/flock"},
	"runtime/dockerplugin/authz":  {"internal/fault", "internal/lazy", "policy", "internal/fsx"},
	"runtime/dockerplugin/volume": {"internal/fault", "runtime/volume"},
	"runtime/doctor":              {},
	"runtime/doctor/checks": {
		"criu", "criu/host", "internal/fault", "internal/guard", "overlay", "runtime/internal/apparmor",
		"runtime/internal/userns", "runtime/doctor",
	},
	"runtime/engine/progress": {"internal/guard", "overlay", "runtime", "runtime/store"},
	"runtime/engine/worktree": {
		"internal/failpoint", "internal/guard", "overlay", "runtime", "runtime/engine/progress", "runtime/store",
	},
	"runtime/eventlog": {"internal/flock"},
	"runtime/internal/apply": {
		"internal/failpoint", "internal/fault", "internal/fsx", "internal/guard", "internal/lazy", "overlay", "runtime",
		"runtime/internal/changes", "runtime/internal/record",
	},
	"runtime/internal/bundle": {
		"runtime/internal/apply", "internal/fault", "internal/lazy", "overlay", "policy", "runtime", "runtime/internal/kernel",
		"runtime/internal/record", "runtime/network", "runtime/internal/apparmor",
	},
	"runtime/internal/box": {
		"criu", "criu/stage", "internal/fault", "internal/fsx", "internal/guard", "internal/undo", "overlay", "runtime",
		"runtime/internal/bundle", "runtime/internal/kernel", "runtime/internal/record",
		"runtime/internal/streams", "runtime/network",
	},
	"runtime/internal/apparmor": {"criu/lsm", "internal/fault"},
	"runtime/internal/changes":  {"overlay", "runtime"},
	"runtime/internal/kernel":   {"internal/fault", "internal/guard", "runtime/internal/record", "internal/proc"},
	"runtime/internal/record":   {"internal/fault", "internal/flock", "internal/fsx", "internal/lazy"},
	"runtime/internal/userns":   {"criu/host", "internal/fault", "internal/idmap", "internal/lazy", "overlay"},
	"runtime/internal/streams": {
		"internal/guard", "runtime", "runtime/internal/kernel", "runtime/internal/record", "internal/fsx",
	},
	"runtime/group": {"internal/guard", "runtime"},
	"runtime/mcp": {
		"internal/cptar/tree", "internal/fault", "internal/guard", "internal/idmap", "internal/rights", "policy",
		"runtime", "runtime/internal/bundle", "internal/proc",
	},
	"runtime/network": {
		"internal/failpoint", "internal/fault", "internal/guard", "internal/lazy", "runtime", "runtime/eventlog",
		"runtime/network/egress", "internal/flock", "internal/fsx",
	},
	"runtime/network/egress": {"policy", "runtime/eventlog"},
	"runtime/oci": {
		"criu", "internal/failpoint", "internal/fault", "internal/guard", "overlay", "runtime",
		"runtime/internal/bundle", "runtime/internal/kernel", "runtime/internal/record", "runtime/internal/streams",
		"internal/idmap", "runtime/internal/userns", "runtime/internal/box",
	},
	"runtime/podman": {
		"criu", "criu/host", "criu/stage", "internal/failpoint", "internal/fault", "internal/guard", "internal/lazy",
		"runtime", "runtime/internal/kernel", "runtime/internal/record", "runtime/internal/streams", "internal/flock",
	},
	"runtime/portable": {"internal/failpoint", "internal/fault", "internal/lazy", "overlay", "policy"},
	"runtime/registry": {
		"internal/failpoint", "internal/fault", "internal/remote", "runtime/store/pack", "internal/flock",
	},
	"runtime/session": {"runtime"},
	"runtime/store": {
		"internal/failpoint", "internal/fault", "internal/guard", "overlay", "policy", "runtime/store/pack",
		"internal/flock", "internal/fsx",
	},
	"runtime/store/pack": {"internal/failpoint", "internal/fault", "internal/guard"},
	"runtime/volume": {
		"criu/stage", "internal/failpoint", "internal/fault", "internal/lazy", "overlay", "runtime",
		"runtime/audit", "runtime/internal/apply", "runtime/internal/kernel", "runtime/internal/record",
		"internal/flock", "internal/fsx", "internal/proc",
	},
	"runtime/traces":             {"internal/fault", "internal/lazy", "runtime", "runtime/audit"},
	"runtime/traces/tracestest":  {},
	"internal/remote/remotetest": {},
	"test":                       {},
	"test/containerd":            {},
	"test/docker":                {},
	"test/vm":                    {},
}

// small are the bounds of what a Go program gets with agentbox, the standard library included:
// with sessions the words of package runtime, and no engine, registry or HTTP; with the client of
// the service net/http (184), its websockets and OpenTelemetry's spans, and nothing that works on
// a host.
var small = []struct {
	packages []string
	bound    int
}{
	{[]string{"runtime/session"}, 200},
	{[]string{"runtime/session", "runtime/api"}, 244},
}

func TestSmall(t *testing.T) {
	for _, s := range small {
		args := []string{"list", "-deps"}
		for _, p := range s.packages {
			args = append(args, module+p)
		}
		cmd := exec.Command("go", args...)
		cmd.Dir = "../.."
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // cgo is one more
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		if deps := strings.Fields(string(out)); len(deps) >= s.bound || len(deps) < 5 {
			t.Errorf("%s is %d packages, want fewer than %d:\n%s", strings.Join(s.packages, " with "),
				len(deps), s.bound, out)
		}
	}
}

// TestMap holds the map in docs/architecture.md to the packages that there are: each has a
// row, or is named in the row of the directory that it is in.
func TestMap(t *testing.T) {
	data, err := os.ReadFile("../../docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := map[string]string{} // path -> what it owns
	for line := range strings.Lines(string(data)) {
		cells := strings.SplitN(line, "|", 3)
		if len(cells) != 3 || !strings.HasPrefix(cells[1], " `") || !strings.Contains(cells[1], "/`") {
			continue
		}
		for path := range strings.SplitSeq(cells[1], ",") {
			path = strings.Trim(strings.TrimSpace(path), "`/")
			if info, err := os.Stat("../../" + path); err != nil || !info.IsDir() {
				t.Errorf("the map has %s, which is no directory", path)
			}
			rows[path] = cells[2]
		}
	}
	for name := range allowed {
		_, own := rows[name]
		dir, base := path.Split(name)
		if !own && !strings.Contains(rows[strings.TrimSuffix(dir, "/")], "`"+base+"`") &&
			!strings.Contains(rows["internal"], "`"+strings.TrimPrefix(name, "internal/")+"`") {
			t.Errorf("%s is not in the map", name)
		}
	}
}

func TestImportDirection(t *testing.T) {
	cmd := exec.Command("go", "list", "-tags", "failpoint", "-json=ImportPath,Imports", module+"...")
	cmd.Dir = "../.."
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	seen := 0
	for dec := json.NewDecoder(out); ; seen++ {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimPrefix(p.ImportPath, module)
		may, listed := allowed[name]
		if !listed {
			t.Errorf("%s is not in the table: add it there and to the map in docs/architecture.md", name)
		}
		for _, i := range p.Imports {
			if i, ours := strings.CutPrefix(i, module); ours && !slices.Contains(may, i) {
				t.Errorf("%s imports %s, which the table does not allow", name, i)
			}
		}
		for _, i := range may {
			if !slices.Contains(p.Imports, module+i) {
				t.Errorf("%s does not import %s, as the table says that it may", name, i)
			}
		}
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	if seen < 5 {
		t.Fatalf("go list named %d packages", seen)
	}
}
