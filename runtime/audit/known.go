package audit

import (
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/fsx"
)

// headText has one length, so that it is written over in one piece.
func headText(p place) string { return fmt.Sprintf("%020d %s\n", p.seq, p.hash) }

// head is the last record that was known to be on the disk.
func (l *Log) head() (p place, err error) { return readPlace(filepath.Join(l.dir, "head")) }

// anchor is the same, from beside the log: it stays when all of that is gone.
func (l *Log) anchor() (p place, err error) { return readPlace(l.anchorPath()) }

func (l *Log) anchorPath() string { return l.dir + ".head" }

func readPlace(path string) (p place, err error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return p, err
	}
	if _, err := fmt.Sscanf(string(data), "%d %s\n", &p.seq, &p.hash); err != nil || string(data) != headText(p) {
		return place{}, fmt.Errorf("%s: %w", filepath.Base(path), fault.ErrCorrupt)
	}
	return p, nil
}

// advance notes that a record is on the disk: never before it is, and neither file is
// waited for, so that both can be behind the log, and not ahead of it.
func (l *Log) advance(at place) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if now, err := l.head(); err == nil && now.seq < at.seq { // one that makes no sense stays: verify reports it
		err = overwrite(filepath.Join(l.dir, "head"), at)
		if err != nil {
			return err
		}
	}
	switch now, err := l.anchor(); {
	case errors.Is(err, fs.ErrNotExist):
		if err := l.drop(at); err != nil {
			// The record is on the disk, and what tells of it in the log is, too.
			slog.Warn("audit.head not written; the next verb retries", "file", l.anchorPath(), "err", err)
		}
	case err == nil && now.seq < at.seq:
		return overwrite(l.anchorPath(), at)
	}
	return nil
}

func overwrite(path string, at place) error {
	f, err := os.OpenFile(path, os.O_WRONLY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(headText(at)), 0)
	return errors.Join(err, f.Close())
}

// drop makes the anchor, under the lock; a crash leaves a whole one, or none.
func (l *Log) drop(at place) error {
	path := l.anchorPath()
	return fsx.Write(path, []byte(headText(at)), fsx.Options{Temp: path + ".new"})
}

// witnesses are what only verbs make that were on record, in words; none: "".
func (l *Log) witnesses() (string, error) {
	var all []string
	for _, kind := range []string{"sandboxes", "checkpoints"} {
		list, err := os.ReadDir(filepath.Join(filepath.Dir(l.dir), kind))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return "", err
		}
		n := 0
		for _, e := range list {
			if id, err := hex.DecodeString(e.Name()); err == nil && len(id) == 16 { // else it is the store's own
				n++
			}
		}
		if n > 0 {
			all = append(all, fmt.Sprintf("%s (%d)", kind, n))
		}
	}
	return strings.Join(all, ", "), nil
}
