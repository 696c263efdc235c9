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
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/cptar/tree"
	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime"
)

// The bounds of file tools; docs/mcp.md documents them.
const (
	maxReadText  = 50_000    // bytes of one read_file
	maxReadLines = 2000      // lines, unless asked otherwise
	maxLine      = 2000      // bytes of one line
	maxScan      = 256 << 20 // bytes that are read to get to an offset
	maxFile      = 10 << 20  // bytes of a file that is written or edited
	maxListed    = 1000      // names
	sniff        = 8 << 10   // bytes examined to see whether a file is binary
)

// walkLimits bound list_files, glob and grep.
var walkLimits = policy.Limits{Entries: 100_000, Depth: 64, Time: 10 * time.Second}

// at runs fn on what the path name means in a sandbox, or, with a pattern, on where a walk for
// that begins. Errors name the path as the sandbox has it.
func (s *Server) at(
	ctx context.Context, b *box, name string, g *policy.Glob, fn func(*policy.Scope, policy.Place) error,
) error {
	return s.files(ctx, b, func(scope *policy.Scope) (err error) {
		var at policy.Place
		if g != nil {
			at, err = scope.FindGlob(name, *g)
		} else {
			at, err = scope.Find(name)
		}
		if err != nil {
			return b.corrected(name, err)
		}
		return b.corrected(at.Real, fn(scope, at))
	})
}

// open opens a file for reading. It never blocks: it refuses FIFOs, devices, and files that the
// kernel generates as they are read.
func open(scope *policy.Scope, at policy.Place) (*os.File, fs.FileInfo, error) {
	f, err := scope.OpenFile(at.Path, os.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && info.IsDir() {
		err = &runtime.Error{
			Op: "read", ID: at.Real, Err: fmt.Errorf("%w: it is a directory", runtime.ErrInvalid),
			Hint: "list_files shows what is in it.",
		}
	}
	var st unix.Statfs_t
	if err == nil {
		err = unix.Fstatfs(int(f.Fd()), &st)
	}
	if err == nil && tree.Pseudo(int64(st.Type)) {
		err = &runtime.Error{
			Op: "open", ID: at.Real, Err: fmt.Errorf("%w: the kernel makes it up", runtime.ErrDenied),
			Hint: "Use run_command for it.",
		}
	}
	if err != nil {
		return nil, nil, errors.Join(err, f.Close())
	}
	return f, info, nil
}

type readArgs struct {
	Target
	Path   string `json:"path" jsonschema:"file to read; relative paths begin at the working directory"`
	Offset int    `json:"offset,omitempty" jsonschema:"first line to read, from 1"`
	Limit  int    `json:"limit,omitempty" jsonschema:"lines to read at most; default 2000"`
}

func (s *Server) readFile(ctx context.Context, b *box, in readArgs) (r reply, err error) {
	first, err := orDefault("offset", in.Offset, 1, 1<<30)
	if err != nil {
		return r, err
	}
	limit, err := orDefault("limit", in.Limit, maxReadLines, 1<<20)
	if err != nil {
		return r, err
	}
	err = s.at(ctx, b, in.Path, nil, func(scope *policy.Scope, at policy.Place) error {
		f, info, err := open(scope, at)
		if err != nil {
			return err
		}
		defer f.Close()
		r, err = readLines(ctx, f, info.Size(), first, limit)
		return err
	})
	return r, err
}

// readLines reads up to limit lines from the first one on.
func readLines(ctx context.Context, f io.Reader, size int64, first, limit int) (reply, error) {
	in := bufio.NewReaderSize(io.LimitReader(f, maxScan), 64<<10)
	head, err := in.Peek(sniff)
	if err != nil && err != io.EOF {
		return reply{}, err
	}
	switch {
	case len(head) == 0:
		return reply{note: "[the file is empty]"}, nil
	case bytes.IndexByte(head, 0) >= 0:
		return reply{note: fmt.Sprintf("[a binary file of %d bytes; look at it with run_command, for example with od or file]", size)}, nil
	}
	var text strings.Builder
	clipped := 0
	for n := 1; ; n++ {
		if ctx.Err() != nil {
			return reply{}, ctx.Err()
		}
		line, long, err := nextLine(in)
		if err == io.EOF {
			r := reply{text: text.String(), note: clippedNote(clipped)}
			if n <= first {
				r.note = fmt.Sprintf("[the file has only %d lines]", n-1)
			}
			return r, nil
		}
		if err != nil {
			return reply{}, err
		}
		if n < first {
			continue
		}
		if n >= first+limit || text.Len()+len(line) > maxReadText {
			more := fmt.Sprintf("[this is line %d to %d of a file of %d bytes; go on with offset %[4]d]", first, n-1,
				size, n)
			return reply{text: text.String(), note: more + clippedNote(clipped)}, nil
		}
		text.Write(line)
		if long {
			clipped++
			text.WriteByte('\n')
		}
	}
}

func clippedNote(n int) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf("[%d lines are cut off after %d bytes; see them whole with run_command]", n, maxLine)
}

// nextLine reads a line with its end, or the beginning of one that is too long.
func nextLine(in *bufio.Reader) (line []byte, long bool, err error) {
	for {
		part, err := in.ReadSlice('\n')
		if len(line) < maxLine {
			line = append(line, part...)
		} else if len(part) > 0 {
			long = true
		}
		if err == bufio.ErrBufferFull {
			continue
		}
		if err != nil && (err != io.EOF || len(line) == 0) {
			return nil, false, err
		}
		if len(line) > maxLine {
			return []byte(cutText(string(line), maxLine)), true, nil
		}
		return line, long, nil
	}
}

type writeArgs struct {
	Target
	Path    string `json:"path" jsonschema:"file to write; relative paths begin at the working directory"`
	Content string `json:"content" jsonschema:"all that shall be in the file"`
}

func (s *Server) writeFile(ctx context.Context, b *box, in writeArgs) (r reply, err error) {
	if len(in.Content) > maxFile {
		return r, fmt.Errorf("%w: %d bytes are more than the %d that can be written at once", runtime.ErrInvalid,
			len(in.Content), maxFile)
	}
	if err := s.before(ctx, b, "write_file"); err != nil {
		return r, err
	}
	err = s.at(ctx, b, in.Path, nil, func(scope *policy.Scope, at policy.Place) error {
		_, missing := scope.Lstat(at.Path)
		if err := s.put(scope, at, []byte(in.Content)); err != nil {
			return err
		}
		what := "replaced"
		if missing != nil {
			what = "made"
		}
		r.text = fmt.Sprintf("%s %s, %d bytes", what, at.Real, len(in.Content))
		return nil
	})
	return r, err
}

// put writes a file, and makes the directories to it.
func (s *Server) put(scope *policy.Scope, at policy.Place, data []byte) error {
	if at.Path == "/" {
		return fmt.Errorf("%w: %s is a directory", runtime.ErrInvalid, at.Real)
	}
	dir := path.Dir(at.Path)
	if dir != "/" {
		if err := scope.MkdirAll(dir, 0o755); err != nil {
			return err
		}
	}
	h, err := scope.Handle(dir, true)
	if err != nil {
		return err
	}
	defer h.Close()
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(h.Fd()), &st); err != nil {
		return err
	}
	if tree.Pseudo(int64(st.Type)) {
		return &runtime.Error{Op: "write", ID: at.Real, Err: fmt.Errorf("%w: the kernel makes it up",
			runtime.ErrDenied), Hint: "Use run_command for it."}
	}
	return scope.WriteFile(at.Path, data, 0o644)
}

type editArgs struct {
	Target
	Path       string `json:"path" jsonschema:"file to edit; relative paths begin at the working directory"`
	Old        string `json:"old" jsonschema:"text to replace, exactly as it stands in the file, spaces and line ends included; it must be there once, unless replace_all is set"`
	New        string `json:"new" jsonschema:"text to put in its place"`
	ReplaceAll bool   `json:"replace_all,omitempty" jsonschema:"replace every occurrence"`
}

func (s *Server) editFile(ctx context.Context, b *box, in editArgs) (r reply, err error) {
	if err := s.before(ctx, b, "edit_file"); err != nil {
		return r, err
	}
	b.edits.Lock()
	defer b.edits.Unlock()
	err = s.at(ctx, b, in.Path, nil, func(scope *policy.Scope, at policy.Place) error {
		f, info, err := open(scope, at)
		if err != nil {
			return err
		}
		defer f.Close()
		data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
		if err != nil {
			return err
		}
		if len(data) > maxFile {
			return fmt.Errorf("%w: %s has more than the %d bytes that can be edited",
				runtime.ErrInvalid, at.Real, maxFile)
		}
		data, n, err := edit(data, in.Old, in.New, in.ReplaceAll)
		if err != nil {
			return &runtime.Error{Op: "edit", ID: at.Real, Err: err}
		}
		if len(data) > maxFile {
			return fmt.Errorf("%w: %s would have more than %d bytes", runtime.ErrInvalid, at.Real, maxFile)
		}
		if err := scope.WriteFile(at.Path, data, 0o644); err != nil {
			return err
		}
		r.text = fmt.Sprintf("replaced %d occurrence(s) in %s", n, at.Real)
		if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
			r.note = "[its other hard links keep the old content]"
		}
		return nil
	})
	return r, err
}

// edit replaces old by new, which must be unambiguous unless all are meant.
func edit(data []byte, old, new string, all bool) ([]byte, int, error) {
	bad := func(hint, format string, args ...any) ([]byte, int, error) {
		return nil, 0, &runtime.Error{Err: fmt.Errorf("%w: "+format,
			append([]any{runtime.ErrInvalid}, args...)...), Hint: hint}
	}
	if old == "" {
		return bad("To write a whole file use write_file.", "old is empty")
	}
	if old == new {
		return bad("", "old and new are the same")
	}
	n := bytes.Count(data, []byte(old))
	switch {
	case n == 0 && bytes.Contains(data, []byte("\r\n")) && !strings.Contains(old, "\r\n") &&
		strings.Contains(old, "\n"):
		return bad(`The file's lines end with \r\n: write the line ends like that.`, "old is not in the file")
	case n == 0:
		return bad("Read the file again and copy the text exactly, spaces and line ends included.",
			"old is not in the file")
	case n > 1 && !all:
		return bad("Give more of the text around it, so that it is unique, or set replace_all.",
			"old is in the file %d times, in line %s", n, linesOf(data, old))
	}
	if growth := int64(n) * int64(len(new)-len(old)); int64(len(data))+growth > maxFile {
		return bad("", "the file would have more than %d bytes", maxFile)
	}
	return bytes.ReplaceAll(data, []byte(old), []byte(new)), n, nil
}

// linesOf lists the lines where the first few occurrences begin.
func linesOf(data []byte, old string) string {
	var lines []string
	for line := 1; len(lines) < 5; {
		i := bytes.Index(data, []byte(old))
		if i < 0 {
			return strings.Join(lines, ", ")
		}
		line += bytes.Count(data[:i], []byte("\n"))
		lines = append(lines, fmt.Sprint(line))
		line += strings.Count(old, "\n")
		data = data[i+len(old):]
	}
	return strings.Join(lines, ", ") + ", ..."
}

type listArgs struct {
	Target
	Path  string `json:"path,omitempty" jsonschema:"directory to list; omit it for the working directory"`
	Depth int    `json:"depth,omitempty" jsonschema:"how many levels of directories to list; default 1"`
}

func (s *Server) listFiles(ctx context.Context, b *box, in listArgs) (r reply, err error) {
	depth, err := orDefault("depth", in.Depth, 1, walkLimits.Depth)
	if err != nil {
		return r, err
	}
	err = s.at(ctx, b, in.Path, nil, func(scope *policy.Scope, at policy.Place) error {
		found := results{most: maxListed}
		cut, err := scope.Walk(ctx, at.Path, walkLimits, tree.Pseudo, func(e policy.Entry) error {
			if !found.add(describe(e)) {
				return fs.SkipAll
			}
			if e.Mode.IsDir() && strings.Count(e.Path, "/")+1 >= depth {
				return fs.SkipDir
			}
			return nil
		})
		if err != nil {
			return err
		}
		r = found.reply(at.Real+" has:\n", "["+at.Real+" is empty]", cut)
		return nil
	})
	return r, err
}

// describe is one line of list_files.
func describe(e policy.Entry) string {
	switch {
	case e.Mode.IsDir():
		return e.Path + "/"
	case e.Mode&fs.ModeSymlink != 0:
		link, err := e.Readlink()
		if err != nil {
			link = "?"
		}
		return e.Path + " -> " + link
	case e.Mode.IsRegular():
		return fmt.Sprintf("%s (%d bytes)", e.Path, e.Size)
	}
	return fmt.Sprintf("%s (%s)", e.Path, kind(e.Mode))
}

func kind(mode fs.FileMode) string {
	switch {
	case mode&fs.ModeNamedPipe != 0:
		return "fifo"
	case mode&fs.ModeSocket != 0:
		return "socket"
	}
	return "device"
}

// results gathers lines up to a number and to maxReadText bytes.
type results struct {
	lines []string
	bytes int
	most  int
	full  bool
}

// add takes a line; false: there is no room for it.
func (r *results) add(line string) bool {
	line = oneLine(line)
	if len(r.lines) >= r.most || r.bytes+len(line) > maxReadText {
		r.full = true
		return false
	}
	r.lines, r.bytes = append(r.lines, line), r.bytes+len(line)+1
	return true
}

// reply is the lines below a head; cut is the limit that ended the walk, if any.
func (r *results) reply(head, none, cut string) reply {
	out := reply{note: none}
	if len(r.lines) > 0 {
		out = reply{text: head + strings.Join(r.lines, "\n") + "\n"}
	}
	switch {
	case r.full:
		out.note += fmt.Sprintf("[only the first %d are shown; ask for less at a time]", len(r.lines))
	case cut != "":
		out.note += fmt.Sprintf("[the search ended %s, and is not complete; name a smaller directory]", cut)
	}
	return out
}

// oneLine keeps a file's name from looking like several.
func oneLine(s string) string {
	return strings.NewReplacer("\n", `\n`, "\r", `\r`).Replace(s)
}
