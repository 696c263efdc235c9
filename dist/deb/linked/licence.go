package main

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/google/licensecheck"
)

// A licence file has to be one by this share of its words. One that collects those of
// others' parts says much about the parts, and is passed on whole.
const enough = 75.0

// licence is a file that says on what terms a part of a module may be used.
type licence struct {
	file   string   // below the module
	ids    []string // SPDX's, or an expression of these; none: a notice, which is passed on as it is
	text   string
	holder []string // the lines about copyright
}

var (
	licenceName = regexp.MustCompile(`(?i)^(un)?(licen[cs]e|copying|copyright)([-._].*)?$`)
	noticeName  = regexp.MustCompile(`(?i)^(notice|patents)([-._].*)?$`)
	declared    = regexp.MustCompile(`\A(?:/\*|//|#)?\s*SPDX-License-Identifier: ([-.+() \w]+?)\s*(?:\*/)?\n`)
	holderLine  = regexp.MustCompile(`(?i)^[\s/*#]*(?:portions )?(copyright\s+(?:\(c\)|©|[0-9]{4}|the |[A-Z]).*)$`)
	unlinked    = regexp.MustCompile(`(?i)logo|docs`) // what is in no binary
	collection  = regexp.MustCompile(`(?i)3rd|third`)
	template    = regexp.MustCompile(`(?i)\[yyyy\]|<year>|Free Software Foundation|\{yyyy\}|copyright (?:owner|holder|notice|license|law|statement|interest|and related|ownership|in the)|as a whole`)
)

// publicDomain begins SQLite's dedication, which is no licence.
const (
	publicDomain   = "public-domain"
	publicDomainOf = "SQLite Is Public Domain\n"
)

// findLicences reads the files at the linked packages of a module and above them.
func findLicences(m *module) ([]licence, error) {
	var found []licence
	var seen []string
	for _, dir := range m.packages {
		for _, d := range above(m.dir, dir) {
			if slices.Contains(seen, d) {
				continue
			}
			seen = append(seen, d)
			more, err := licencesIn(m, d)
			if err != nil {
				return nil, err
			}
			found = append(found, more...)
		}
	}
	slices.SortFunc(found, func(a, b licence) int { return strings.Compare(a.file, b.file) })
	if !slices.ContainsFunc(found, func(l licence) bool { return len(l.ids) > 0 }) {
		return nil, fmt.Errorf("%s %s: no licence is known among its files: look, and do not ship it before it is clear", m.path, m.version)
	}
	return found, nil
}

func licencesIn(m *module, dir string) ([]licence, error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, err
	}
	var found []licence
	for _, e := range entries {
		is, notice := licenceName.MatchString(e.Name()), noticeName.MatchString(e.Name())
		if !e.Type().IsRegular() || !is && !notice || unlinked.MatchString(e.Name()) ||
			strings.HasSuffix(e.Name(), ".go") {
			continue
		}
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		rel, err := filepath.Rel(m.dir, filepath.Join(dir, e.Name()))
		if err != nil {
			return nil, err
		}
		l := licence{file: filepath.ToSlash(rel), text: string(data), holder: holders(string(data))}
		if is {
			if l.ids, err = identify(data, collection.MatchString(l.file)); err != nil {
				return nil, fmt.Errorf("%s %s: %s: %w", m.path, m.version, l.file, err)
			}
		}
		found = append(found, l)
	}
	return found, nil
}

// identify tells which licences a text is.
func identify(text []byte, collected bool) ([]string, error) {
	if strings.HasPrefix(string(text), publicDomainOf) {
		return []string{publicDomain}, nil
	}
	if m := declared.FindSubmatch(text); m != nil { // as one of two that may be chosen
		return []string{string(m[1])}, nil
	}
	cover := licensecheck.Scan(text)
	var ids []string
	for _, match := range cover.Match {
		if !match.IsURL && !slices.Contains(ids, match.ID) {
			ids = append(ids, match.ID)
		}
	}
	slices.Sort(ids)
	if len(ids) == 0 || !collected && cover.Percent < enough {
		return nil, fmt.Errorf("%.0f%% of it is a licence that is known (%s): look, and do not ship it before it is clear", cover.Percent, strings.Join(ids, ", "))
	}
	return ids, nil
}

func holders(text string) []string {
	var lines []string
	for line := range strings.Lines(text) {
		m := holderLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil || template.MatchString(m[1]) {
			continue
		}
		if h := strings.TrimRight(strings.TrimSpace(m[1]), "."); !slices.Contains(lines, h) {
			lines = append(lines, h)
		}
	}
	return lines
}
