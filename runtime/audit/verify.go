package audit

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
)

// maxFindings bounds a report: of a log that was written over each line is one.
const maxFindings = 100

// Finding is one place where the log is not as it was written.
type Finding struct {
	Segment string `json:"segment,omitempty"`
	Line    int    `json:"line,omitempty"`
	Seq     uint64 `json:"seq,omitempty"`
	What    string `json:"what"`
}

// Report is the documented JSON of `agentbox audit verify`; it only ever grows.
type Report struct {
	OK       bool      `json:"ok"`
	Records  int       `json:"records"`
	Segments int       `json:"segments"`
	First    uint64    `json:"first"` // number of the oldest record there is
	Seq      uint64    `json:"seq"`   // number of the newest
	Head     string    `json:"head"`  // hash of the newest: to be noted elsewhere, for --expect-head
	Findings []Finding `json:"findings"`
	Notes    []string  `json:"notes"` // what is no sign of tampering: cut short by a crash, begun and not ended
}

// verifying is one pass over the log.
type verifying struct {
	out     Report
	last    place
	expect  string
	found   bool // the expected hash
	known   []knownPlace
	before  *place // what the oldest record follows, when it is not the first
	dropped bool   // a record says that those before the oldest were removed
	open    map[uint64]string
	hidden  int // findings beyond the bound
}

// Verify reads all of the log. expect, if it is not empty, is the hash of a record
// that must be there. Others may append meanwhile.
func (l *Log) Verify(ctx context.Context, expect string) (Report, error) {
	v := verifying{
		expect: expect, open: map[uint64]string{}, last: place{0, genesis},
		out: Report{Findings: []Finding{}, Notes: []string{}},
	}
	// Before the records: those that are on the disk by now are all there.
	head, herr := l.head()
	anchor, aerr := l.anchor()
	names, err := l.segments()
	if err != nil {
		return v.out, err
	}
	_, err = os.Lstat(l.dir)
	gone := errors.Is(err, fs.ErrNotExist)
	if gone {
		herr = nil // it is found below, if there ever was a log
	}
	v.known = []knownPlace{{place: head}}
	if anchor != head {
		v.known = append(v.known, knownPlace{place: anchor})
	}
	for i, name := range names {
		if err := v.segment(ctx, filepath.Join(l.dir, name), i == len(names)-1); err != nil {
			return v.out, err
		}
	}
	v.out.Segments, v.out.Seq, v.out.Head = len(names), v.last.seq, v.last.hash
	if v.before != nil && !v.dropped {
		v.find(Finding{
			Segment: names[0], Seq: v.before.seq + 1,
			What: fmt.Sprintf("the records up to %d are missing, and no record tells that they were pruned",
				v.before.seq),
		})
	}
	if herr != nil {
		v.find(Finding{What: fmt.Sprintf("the file head, which has the number and hash of the last record on the disk: %v", herr)})
	}
	switch {
	case errors.Is(aerr, fs.ErrNotExist) && gone:
		made, err := l.witnesses()
		if err != nil {
			return v.out, err
		}
		if made != "" {
			v.find(Finding{What: fmt.Sprintf("%s is gone: there is no record at all, though there are %s, each of which was put on record", l.dir, made)})
		}
	case errors.Is(aerr, fs.ErrNotExist):
		v.out.Notes = append(v.out.Notes,
			fmt.Sprintf("there is no %s, which would tell if all of the log were gone: removed, or of an agentbox that made none; the next verb makes it", l.anchorPath()))
	case aerr != nil:
		v.find(Finding{What: fmt.Sprintf("%s, which has the number and hash of the last record on the disk: %v",
			l.anchorPath(), aerr)})
	}
	v.ends(gone, l.dir)
	if expect != "" && !v.found {
		v.find(Finding{What: fmt.Sprintf("no record has the hash %.64s", expect)})
	}
	if v.hidden > 0 {
		v.out.Findings = append(v.out.Findings, Finding{What: fmt.Sprintf("and %d more", v.hidden)})
	}
	if n := len(v.open); n > 0 {
		v.out.Notes = append(v.out.Notes, fmt.Sprintf("%d begun without an end: under way now, or killed", n))
	}
	v.out.OK = len(v.out.Findings) == 0
	return v.out, nil
}

// A knownPlace is one that was on the disk.
type knownPlace struct {
	place
	seen, met bool // a record of its number, and of its hash
}

func (k *knownPlace) meet(at place) {
	k.seen = k.seen || at.seq == k.seq
	k.met = k.met || at == k.place
}

// ends finds records that are missing at the end or were replaced there. Records missing
// before it are found as a gap.
func (v *verifying) ends(gone bool, dir string) {
	last := v.last.seq
	for _, k := range v.known {
		switch {
		case k.seq > last && gone:
			v.find(Finding{
				Seq: k.seq, What: fmt.Sprintf("%s is gone, and with it the records up to %d, which were on the disk",
					dir, k.seq),
			})
		case k.seq > last:
			v.find(Finding{
				Seq: k.seq, What: fmt.Sprintf("the records %d to %d, which were on the disk, are missing at the end",
					last+1, k.seq),
			})
		case k.seen && !k.met:
			v.find(Finding{Seq: k.seq, What: "another record than the one that was on the disk"})
		}
		last = max(last, k.seq)
	}
}

func (v *verifying) find(f Finding) {
	if len(v.out.Findings) == maxFindings {
		v.hidden++
		return
	}
	v.out.Findings = append(v.out.Findings, f)
}

// segment reads one of them.
func (v *verifying) segment(ctx context.Context, path string, newest bool) error {
	base, n := filepath.Base(path), 0
	return eachLine(ctx, path, func(line []byte, whole bool) error {
		n++
		at := Finding{Segment: base, Line: n}
		if !whole {
			if newest {
				v.out.Notes = append(v.out.Notes,
					fmt.Sprintf("%s ends with %d bytes of a record that a crash has cut short, or that is being written", base, len(line)))
				return nil
			}
			at.What = "a record without its end, in the middle of the log"
			v.find(at)
			return nil
		}
		r, intact, err := unseal(line)
		if err != nil {
			at.What = "this line is no record"
			v.find(at)
			return nil
		}
		if v.out.Records == 0 && r.Seq > 1 {
			v.before = &place{r.Seq - 1, r.Prev}
			v.last = *v.before
		}
		if v.out.Records == 0 {
			v.out.First = r.Seq
			if seq, _ := segmentSeq(base); seq != r.Seq {
				v.find(Finding{Segment: base, Line: n, Seq: r.Seq, What: "the segment is named after another record"})
			}
		}
		at.Seq = r.Seq
		switch {
		case !intact:
			at.What = "this record was changed: it does not have its hash"
		case r.Seq > v.last.seq+1:
			at.What = fmt.Sprintf("the records %d to %d are missing", v.last.seq+1, r.Seq-1)
		case r.Seq <= v.last.seq:
			at.What = fmt.Sprintf("this record is out of its place: it stands behind %d", v.last.seq)
		case r.Prev != v.last.hash:
			at.What = fmt.Sprintf("this record does not follow the %d that stands before it", v.last.seq)
		}
		if at.What != "" {
			v.find(at)
		}
		if v.out.Records++; r.Seq > v.last.seq {
			v.last = place{r.Seq, r.Hash}
		}
		v.found = v.found || r.Hash == v.expect
		for i := range v.known {
			v.known[i].meet(place{r.Seq, r.Hash})
		}
		if r.Torn > 0 {
			v.out.Notes = append(v.out.Notes, fmt.Sprintf("before record %d a crash has cut one short", r.Seq))
		}
		switch {
		case r.Phase == Begin:
			v.open[r.Seq] = r.Verb
		case r.Phase == End:
			delete(v.open, r.Of)
		}
		if r.Dropped != nil && v.before != nil && intact && r.Dropped.To >= v.before.seq {
			v.dropped = true
		}
		return nil
	})
}

// eachLine hands the lines of a file to each, without their newline; whole: it
// had one.
func eachLine(ctx context.Context, path string, each func(line []byte, whole bool) error) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	in := bufio.NewReaderSize(f, 2*maxLine)
	for {
		if err := ctx.Err(); err != nil {
			return err
		}
		line, err := in.ReadSlice('\n')
		switch {
		case err == nil:
			err = each(line[:len(line)-1], true)
		case errors.Is(err, bufio.ErrBufferFull):
			// Longer than any record: what is left of it is passed over.
			n := len(line)
			for errors.Is(err, bufio.ErrBufferFull) {
				line, err = in.ReadSlice('\n')
				n += len(line)
			}
			if err == nil || errors.Is(err, io.EOF) {
				err = each(nil, err == nil || n > 2*maxLine)
			}
		case errors.Is(err, io.EOF) && len(line) == 0:
			return nil
		case errors.Is(err, io.EOF):
			return each(line, false)
		}
		if err != nil {
			return err
		}
	}
}

// lines are those of a segment, the newest first, until each returns false.
func backward(path string, each func(line []byte) bool) (more bool, err error) {
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil // pruned meanwhile
	}
	if err != nil {
		return false, err
	}
	for {
		end := bytes.LastIndexByte(data, '\n')
		if end < 0 {
			return true, nil
		}
		begin := bytes.LastIndexByte(data[:end], '\n') + 1
		if !each(data[begin:end]) {
			return false, nil
		}
		data = data[:begin]
	}
}

// corrupt is the error of a log with findings.
func (r Report) Err() error {
	if r.OK {
		return nil
	}
	what := "findings"
	if len(r.Findings) == 1 {
		what = "finding"
	}
	return fmt.Errorf("the audit log is %w: %d %s", fault.ErrCorrupt, len(r.Findings), what)
}
