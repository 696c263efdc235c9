package main

import (
	"bytes"
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The smaller of the programs: every module in it is in both files, with its terms.
func TestRuntime(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "agentbox-runtime")
	if out, err := exec.Command("go", "build", "-ldflags", "-s -w", "-o", program,
		"../../../cmd/agentbox-runtime").CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	copyright, bom := filepath.Join(dir, "copyright"), filepath.Join(dir, "bom")
	var first []byte
	for range 2 {
		if err := run([]string{program}, copyright, bom, "1.2.3"); err != nil {
			t.Fatal(err)
		}
		both := append(mustRead(t, copyright), mustRead(t, bom)...)
		if first != nil && !bytes.Equal(first, both) {
			t.Error("not the same bytes twice")
		}
		first = both
	}

	out, err := exec.Command("go", "version", "-m", program).Output()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) > 2 && f[0] == "dep" {
			want[f[1]] = f[2]
		}
	}
	if want["golang.org/x/sys"] == "" {
		t.Fatalf("go version -m says %q", out)
	}
	var list struct {
		Metadata   struct{ Component struct{ Version string } }
		Components []struct {
			Name, Version string
			PURL          string
			Licenses      []struct{ License struct{ ID string } }
		}
	}
	if err := json.Unmarshal(mustRead(t, bom), &list); err != nil {
		t.Fatal(err)
	}
	text := string(mustRead(t, copyright))
	for _, c := range list.Components {
		if c.Name != stdPath && want[c.Name] != c.Version {
			t.Errorf("%s %s is not linked, but %q", c.Name, c.Version, want[c.Name])
		}
		delete(want, c.Name)
		if len(c.Licenses) == 0 || c.PURL == "" {
			t.Errorf("%s: %+v", c.Name, c)
		}
		if !strings.Contains(text, "\nFiles: "+c.Name+"/*\nCopyright: ") {
			t.Errorf("%s is not in the copyright file", c.Name)
		}
	}
	if len(want) > 0 || list.Metadata.Component.Version != "1.2.3" {
		t.Errorf("version %q, not listed: %v", list.Metadata.Component.Version, want)
	}
	if !strings.Contains(text, "Copyright 2009 The Go Authors") ||
		!strings.Contains(text, "this list of conditions and the following disclaimer") {
		t.Error("the terms of golang.org/x/sys are missing")
	}
}

// What is not known stops the package.
func TestUnknown(t *testing.T) {
	dir := t.TempDir()
	m := &module{path: "example.org/m", version: "v1", dir: dir, packages: []string{dir}}
	if _, err := findLicences(m); err == nil || !strings.Contains(err.Error(), "example.org/m v1: no licence") {
		t.Errorf("nothing: %v", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "LICENSE"),
		[]byte("You may look at this on Sundays, if you ask first.\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := findLicences(m); err == nil || !strings.Contains(err.Error(), "LICENSE") {
		t.Errorf("a text of its own: %v", err)
	}
}

func TestHolders(t *testing.T) {
	got := holders("  Copyright (c) 2020 Ann Author.\n# Copyright [yyyy] [name of copyright owner]\nthe copyright notice\nCOPYRIGHT HOLDERS AND\nCopyright (c) 2020 Ann Author\n")
	if len(got) != 1 || got[0] != "Copyright (c) 2020 Ann Author" {
		t.Errorf("%q", got)
	}
}

func mustRead(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}
