package mcp

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"regexp"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

const (
	maxPattern   = 4096      // bytes of a regular expression
	maxMatches   = 200       // of grep, unless asked otherwise
	maxGrepBytes = 512 << 20 // that one grep reads
	maxGrepLine  = 500       // bytes shown of a line
	maxContext   = 10        // lines
)

type globArgs struct {
	Target
	Pattern string `json:"pattern" jsonschema:"for example *.go, src/**/*.py or **/{a,b}.txt; ** stands for any number of directories"`
	Path    string `json:"path,omitempty" jsonschema:"directory to begin in; omit it for the working directory"`
}

func (s *Server) glob(ctx context.Context, b *box, in globArgs) (r reply, err error) {
	g, err := policy.ParseGlob(in.Pattern)
	if err != nil {
		return r, err
	}
	err = s.at(ctx, b, in.Path, &g, func(scope *policy.Scope, at policy.Place) error {
		found := results{most: maxListed}
		cut, err := scope.Walk(ctx, at.Path, walkLimits, tree.Pseudo, func(e policy.Entry) error {
			name := path.Join(at.Real, e.Path)
			if e.Mode.IsDir() {
				name += "/"
			}
			if g.Match(e.Path) && !found.add(name) {
				return fs.SkipAll
			}
			if e.Mode.IsDir() && !g.Below(e.Path) {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return err
		}
		r = found.reply("", "[nothing in "+at.Real+" matches]", cut)
		return nil
	})
	return r, err
}

type grepArgs struct {
	Target
	Pattern    string `json:"pattern" jsonschema:"regular expression in RE2 syntax, matched against each line"`
	Path       string `json:"path,omitempty" jsonschema:"file or directory to search; omit it for the working directory"`
	Glob       string `json:"glob,omitempty" jsonschema:"only files that match this pattern; without a slash it is matched against their names"`
	IgnoreCase bool   `json:"ignore_case,omitempty"`
	FilesOnly  bool   `json:"files_only,omitempty" jsonschema:"tell only which files match"`
	Context    int    `json:"context,omitempty" jsonschema:"lines to show before and after each match, up to 10"`
	Limit      int    `json:"limit,omitempty" jsonschema:"matches to show at most; default 200"`
}

func (s *Server) grep(ctx context.Context, b *box, in grepArgs) (r reply, err error) {
	search, g, err := in.parse()
	if err != nil {
		return r, err
	}
	var begin *policy.Glob // without a slash it is matched against names, wherever
	if strings.Contains(in.Glob, "/") {
		begin = &g
	}
	err = s.at(ctx, b, in.Path, begin, func(scope *policy.Scope, at policy.Place) error {
		info, err := scope.Stat(at.Path)
		if err != nil {
			return err
		}
		if !info.IsDir() {
			f, _, err := open(scope, at)
			if err != nil {
				return err
			}
			defer f.Close()
			if err := search.file(ctx, at.Real, f); err != nil && !errors.Is(err, fs.SkipAll) {
				return err
			}
			r = search.reply(at.Real, "")
			return nil
		}
		cut, err := scope.Walk(ctx, at.Path, walkLimits, tree.Pseudo, func(e policy.Entry) error {
			if !e.Mode.IsRegular() || !in.wants(g, e.Path) {
				return nil
			}
			f, err := e.Open()
			if err != nil {
				search.unread++
				return nil
			}
			defer f.Close()
			return search.file(ctx, path.Join(at.Real, e.Path), f)
		})
		if err != nil {
			return err
		}
		r = search.reply(at.Real, cut)
		return nil
	})
	return r, err
}

// parse checks the arguments; without a glob all files are wanted.
func (in grepArgs) parse() (*search, policy.Glob, error) {
	var g policy.Glob
	limit, err := orDefault("limit", in.Limit, maxMatches, maxListed)
	if err != nil {
		return nil, g, err
	}
	if in.Context < 0 || in.Context > maxContext {
		return nil, g, fmt.Errorf("%w: context %d: give 0 to %d", runtime.ErrInvalid, in.Context, maxContext)
	}
	if len(in.Pattern) > maxPattern {
		return nil, g, fmt.Errorf("%w: the pattern is longer than %d bytes", runtime.ErrInvalid, maxPattern)
	}
	expr := in.Pattern
	if in.IgnoreCase {
		expr = "(?i:" + expr + ")"
	}
	re, err := regexp.Compile(expr)
	if err != nil {
		return nil, g, &runtime.Error{
			Err:  fmt.Errorf("%w: %v", runtime.ErrInvalid, err),
			Hint: `Escape ( ) [ ] { } . * + ? | ^ $ and \ with a backslash where they stand for themselves.`,
		}
	}
	if in.Glob != "" {
		if g, err = policy.ParseGlob(in.Glob); err != nil {
			return nil, g, err
		}
	}
	return &search{
		begun: time.Now(), re: re, results: results{most: limit}, context: in.Context, filesOnly: in.FilesOnly,
	}, g, nil
}

// wants reports whether a file is to be searched.
func (in grepArgs) wants(g policy.Glob, rel string) bool {
	switch {
	case in.Glob == "":
		return true
	case !strings.Contains(in.Glob, "/"):
		return g.Match(path.Base(rel))
	}
	return g.Match(rel)
}

// search is one grep.
type search struct {
	results
	re        *regexp.Regexp
	context   int
	filesOnly bool

	begun  time.Time
	late   bool
	read   int64 // bytes
	binary int   // files passed over
	unread int
}

// file searches one file; fs.SkipAll: there is no room for more.
func (s *search) file(ctx context.Context, name string, f *os.File) error {
	left := maxGrepBytes - s.read
	if left <= 0 {
		s.full = true
		return fs.SkipAll
	}
	counted := &io.LimitedReader{R: f, N: left}
	defer func() { s.read += left - counted.N }()
	in := bufio.NewReaderSize(counted, 64<<10)
	head, err := in.Peek(sniff)
	if err != nil && err != io.EOF {
		s.unread++
		return nil
	}
	if bytes.IndexByte(head, 0) >= 0 {
		s.binary++
		return nil
	}
	var before []string // the lines of context that were not shown yet
	after := 0
	for n := 1; ; n++ {
		if n%1000 == 0 {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if time.Since(s.begun) > walkLimits.Time {
				s.late = true
				return fs.SkipAll
			}
		}
		line, _, err := nextLine(in)
		if err != nil {
			if err != io.EOF {
				s.unread++
			}
			return nil
		}
		line = bytes.TrimRight(line, "\r\n")
		show := func(mark string) string {
			return fmt.Sprintf("%s%s%d%s%s", name, mark, n, mark, cutText(string(line), maxGrepLine))
		}
		switch {
		case s.re.Match(line):
			if s.filesOnly {
				if !s.add(name) {
					return fs.SkipAll
				}
				return nil
			}
			for _, l := range append(before, show(":")) {
				if !s.add(l) {
					return fs.SkipAll
				}
			}
			before, after = nil, s.context
		case after > 0:
			after--
			if !s.add(show("-")) {
				return fs.SkipAll
			}
		case s.context > 0:
			if len(before) == s.context {
				before = before[1:]
			}
			before = append(before, show("-"))
		}
	}
}

func (s *search) reply(where, cut string) reply {
	if s.late {
		cut = fmt.Sprintf("after %s", walkLimits.Time)
	}
	r := s.results.reply("", "[nothing in "+where+" matches]", cut)
	if s.binary > 0 {
		r.note += fmt.Sprintf("[%d binary files were passed over]", s.binary)
	}
	if s.unread > 0 {
		r.note += fmt.Sprintf("[%d files could not be read]", s.unread)
	}
	return r
}
