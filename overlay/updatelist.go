package overlay

import (
	"encoding/binary"
	"fmt"
	"os"
	"path/filepath"

	"github.com/agentbox/agentbox/internal/fault"
)

// spillAt is how many bytes of changes are kept in memory: those of an everyday
// update are, those of an empty directory that gets a million files are not.
var spillAt = 4 << 20

// changeList has the changes of an Update in the order of ComparePaths. In
// memory it has a few bytes for each; the rest is in a file without a name once
// it is much.
type changeList struct {
	beside string // the file is made in the directory of this one
	index  []changeAt
	size   int64 // of all changes
	file   *os.File
	begin  int64  // of buf in the list: what is before it is in the file
	buf    []byte // what is not in the file
}

// changeAt is the place of a change: the length of the old entry's JSON
// (uint32; 0: none), that, and the new entry's. What is done about it changes
// while others are planned.
type changeAt struct {
	off int64
	do  action
}

func (l *changeList) add(old, now *Entry, do action) error {
	l.index = append(l.index, changeAt{l.size, do})
	start := len(l.buf)
	l.buf = append(l.buf, 0, 0, 0, 0)
	if old != nil {
		l.buf = old.AppendJSON(l.buf)
		binary.LittleEndian.PutUint32(l.buf[start:], uint32(len(l.buf)-start-4))
	}
	if now != nil {
		l.buf = now.AppendJSON(l.buf)
	}
	l.size += int64(len(l.buf) - start)
	if len(l.buf) < spillAt {
		return nil
	}
	return l.spill()
}

// spill moves what is in memory to the file.
func (l *changeList) spill() error {
	if l.file == nil {
		f, err := os.CreateTemp(filepath.Dir(l.beside), filepath.Base(l.beside)+".changes-")
		if err != nil {
			return fmt.Errorf("keep changes: %w", err)
		}
		l.file = f
		if err := os.Remove(f.Name()); err != nil {
			return fmt.Errorf("keep changes: %w", err)
		}
	}
	if _, err := l.file.WriteAt(l.buf, l.begin); err != nil {
		return fmt.Errorf("keep changes: %w", err)
	}
	l.begin += int64(len(l.buf))
	l.buf = l.buf[:0]
	if cap(l.buf) > 2*spillAt {
		l.buf = nil // one huge entry is not remembered for ever
	}
	return nil
}

// end takes back the memory of a list that is in the file.
func (l *changeList) end() error {
	if l.file == nil {
		return nil
	}
	err := l.spill()
	l.buf = nil
	return err
}

func (l *changeList) close() error {
	f := l.file
	if l.file = nil; f == nil {
		return nil
	}
	return f.Close()
}

// raw returns the bytes of a change, in buf if they fit there.
func (l *changeList) raw(i int, buf []byte) ([]byte, error) {
	from, to := l.index[i].off, l.size
	if i+1 < len(l.index) {
		to = l.index[i+1].off
	}
	if from >= l.begin {
		return l.buf[from-l.begin : to-l.begin], nil
	}
	n := int(to - from)
	if cap(buf) < n {
		buf = make([]byte, n)
	}
	if _, err := l.file.ReadAt(buf[:n], from); err != nil {
		return nil, fmt.Errorf("read changes back: %w", err)
	}
	return buf[:n], nil
}

// at returns a change. It may be called from several goroutines once all are added.
func (l *changeList) at(i int) (*updateChange, error) {
	var small [1 << 10]byte
	raw, err := l.raw(i, small[:0])
	if err != nil {
		return nil, err
	}
	var sides [2]*Entry
	n := int(binary.LittleEndian.Uint32(raw)) + 4
	for side, line := range [][]byte{raw[4:n], raw[n:]} {
		if len(line) == 0 {
			continue
		}
		p := lineParser{rest: line}
		e := p.entry()
		if p.bad || len(p.rest) > 0 {
			return nil, corrupt("a change is not what was kept: %q", clip(string(line)))
		}
		sides[side] = &e
	}
	c := newChange(sides[0], sides[1])
	c.do = l.index[i].do
	return c, nil
}

// find returns the index of a path's change, or -1: it is as wanted.
func (l *changeList) find(path string) (int, error) {
	var small [1 << 10]byte
	low, high := 0, len(l.index)
	for low < high {
		mid := int(uint(low+high) >> 1)
		raw, err := l.raw(mid, small[:0])
		if err != nil {
			return -1, err
		}
		p := lineParser{rest: raw[4:]} // of whichever side is there first
		p.expect("{")
		have := p.name("path")
		if p.bad {
			return -1, fmt.Errorf("a change is not what was kept: %w", fault.ErrCorrupt)
		}
		switch order := ComparePaths(have, path); {
		case order == 0:
			return mid, nil
		case order < 0:
			low = mid + 1
		default:
			high = mid
		}
	}
	return -1, nil
}
