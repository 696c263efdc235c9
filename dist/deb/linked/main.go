// Command linked tells what is linked into binaries, for packages: their licences in
// Debian's copyright format, and a bill of materials in CycloneDX. It goes by what the
// binaries themselves say, and by the files of the modules; what it cannot tell fails.
package main

import (
	"debug/buildinfo"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
)

// stdPath is how the standard library is named among modules.
const stdPath = "std"

// binary is one program and what it is made of.
type binary struct {
	name    string
	pkg     string   // its main package
	modules []string // paths, sorted; the standard library is among them
}

// module is what of one module is linked.
type module struct {
	path, version, sum string
	dir                string
	packages           []string // directories of the linked packages below dir
	licences           []licence
}

func main() {
	copyright := flag.String("copyright", "", "write Debian's copyright to `FILE`")
	bom := flag.String("sbom", "", "write the bill of materials to `FILE`")
	version := flag.String("version", "", "the `VERSION` of agentbox")
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(),
			"usage: linked [-copyright FILE] [-sbom FILE] -version VERSION BINARY...")
		flag.PrintDefaults()
	}
	flag.Parse()
	if flag.NArg() == 0 || *version == "" {
		flag.Usage()
		os.Exit(2)
	}
	if err := run(flag.Args(), *copyright, *bom, *version); err != nil {
		fmt.Fprintln(os.Stderr, "linked:", err)
		os.Exit(1)
	}
}

func run(paths []string, copyright, bom, version string) error {
	binaries, modules, target, err := inspect(paths)
	if err != nil {
		return err
	}
	for _, m := range modules {
		if m.licences, err = findLicences(m); err != nil {
			return err
		}
	}
	list := slices.SortedFunc(maps.Values(modules), func(a, b *module) int { return strings.Compare(a.path, b.path) })
	if copyright != "" {
		if err := write(copyright, func(w io.Writer) error { return writeCopyright(w, list) }); err != nil {
			return err
		}
	}
	if bom != "" {
		return write(bom, func(w io.Writer) error { return writeBOM(w, version, target, binaries, list) })
	}
	return nil
}

func write(name string, to func(io.Writer) error) (err error) {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	return to(f)
}

// inspect reads what the binaries say they were built of, and finds it here.
func inspect(paths []string) (binaries []binary, modules map[string]*module, target string, err error) {
	modules = map[string]*module{}
	for _, p := range paths {
		info, err := buildinfo.ReadFile(p)
		if err != nil {
			return nil, nil, "", err
		}
		settings := map[string]string{}
		for _, s := range info.Settings {
			settings[s.Key] = s.Value
		}
		on := settings["GOOS"] + "/" + settings["GOARCH"]
		if target != "" && target != on {
			return nil, nil, "", fmt.Errorf("%s is for %s, the others are for %s", p, on, target)
		}
		target = on
		b := binary{name: filepath.Base(p), pkg: info.Path}
		for _, dep := range append(info.Deps, &debug.Module{Path: stdPath, Version: info.GoVersion}) {
			if dep.Replace != nil {
				return nil, nil, "", fmt.Errorf("%s: %s is replaced by %s: whose licence counts?", p,
					dep.Path, dep.Replace.Path)
			}
			if had := modules[dep.Path]; had == nil {
				modules[dep.Path] = &module{path: dep.Path, version: dep.Version, sum: dep.Sum}
			} else if had.version != dep.Version {
				return nil, nil, "", fmt.Errorf("%s has %s %s, another binary %s", p, dep.Path,
					dep.Version, had.version)
			}
			b.modules = append(b.modules, dep.Path)
		}
		slices.Sort(b.modules)
		binaries = append(binaries, b)
		if err := locate(b, settings, info.GoVersion, modules); err != nil {
			return nil, nil, "", err
		}
	}
	for _, m := range modules {
		if m.dir == "" {
			return nil, nil, "", fmt.Errorf("%s is linked, and no package of it is needed: the binaries are not of this tree", m.path)
		}
	}
	return binaries, modules, target, nil
}

// locate asks go for the directories of all packages that a binary is built of, as it was built.
func locate(b binary, settings map[string]string, goVersion string, modules map[string]*module) error {
	args := []string{"list", "-deps", "-json=ImportPath,Dir,Standard,Module"}
	if tags := settings["-tags"]; tags != "" {
		args = append(args, "-tags", tags)
	}
	cmd := exec.Command("go", append(args, b.pkg)...)
	cmd.Env = append(os.Environ(), "GOOS="+settings["GOOS"], "GOARCH="+settings["GOARCH"],
		"CGO_ENABLED="+settings["CGO_ENABLED"])
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = addPackages(out, modules)
	_, _ = io.Copy(io.Discard, out)
	if err := errors.Join(err, cmd.Wait()); err != nil {
		return fmt.Errorf("go list %s: %w", b.pkg, err)
	}
	return locateStd(goVersion, modules[stdPath])
}

func addPackages(r io.Reader, modules map[string]*module) error {
	for d := json.NewDecoder(r); ; {
		var p struct {
			ImportPath, Dir string
			Standard        bool
			Module          *struct {
				Path, Version, Dir string
				Main               bool
			}
		}
		if err := d.Decode(&p); err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if p.Standard || p.Module == nil || p.Module.Main {
			continue
		}
		m := modules[p.Module.Path]
		if m == nil || m.version != p.Module.Version {
			return fmt.Errorf("%s %s is not what is linked: the binary is not of this tree",
				p.Module.Path, p.Module.Version)
		}
		m.dir = p.Module.Dir
		if !slices.Contains(m.packages, p.Dir) {
			m.packages = append(m.packages, p.Dir)
		}
	}
}

// locateStd finds the licence of Go itself, which covers the standard library.
func locateStd(version string, std *module) error {
	out, err := exec.Command("go", "env", "GOROOT", "GOVERSION").Output()
	if err != nil {
		return fmt.Errorf("go env: %w", err)
	}
	root, here, _ := strings.Cut(strings.TrimSpace(string(out)), "\n")
	if here != version {
		return fmt.Errorf("built by %s, and this is %s", version, here)
	}
	std.dir = root
	std.packages = []string{root}
	return nil
}

// above lists dir and the directories over it, up to root.
func above(root, dir string) []string {
	rel, err := filepath.Rel(root, dir)
	if err != nil || !filepath.IsLocal(rel) {
		return nil
	}
	var dirs []string
	for rel = filepath.ToSlash(rel); rel != "."; rel = path.Dir(rel) {
		dirs = append(dirs, filepath.Join(root, filepath.FromSlash(rel)))
	}
	return append(dirs, root)
}
