package egress

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Event is one denied attempt, or one that failed for a reason of ours; the
// line of `agentbox events --format json`. It only ever grows.
type Event struct {
	Time     time.Time `json:"time"`
	Sandbox  string    `json:"sandbox"`
	Protocol string    `json:"protocol"`          // dns, tls, http, tcp, udp, icmp, or a protocol's number
	Name     string    `json:"name,omitempty"`    // as the sandbox wrote it
	Address  string    `json:"address,omitempty"` // IP:PORT that it wanted, or only IP
	Reason   string    `json:"reason"`            // why not
	Missed   int       `json:"missed,omitempty"`  // attempts before this one that were too many to write down
}

const (
	eventSize  = 4 << 10 // of a line at most
	logLimit   = 1 << 20 // of a file; there are at most two
	eventRate  = 20      // per second, after the first eventBurst
	eventBurst = 200
)

// LogPath is where the events of a sandbox are; the older ones are in a file
// beside it.
func LogPath(dir, id string) string { return filepath.Join(dir, id+".jsonl") }

func olderPath(dir, id string) string { return filepath.Join(dir, id+".1.jsonl") }

// RemoveLog removes what is known of a sandbox.
func RemoveLog(dir, id string) error {
	var errs []error
	for _, path := range []string{LogPath(dir, id), olderPath(dir, id)} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// eventLog writes one sandbox's events.
type eventLog struct {
	dir, id string

	mu     sync.Mutex
	closed bool
	bucket bucket
	missed int
	last   Event // identical attempts within a second are one
}

func (l *eventLog) add(e Event) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.closed {
		return nil
	}
	e.Time, e.Sandbox = time.Now().UTC(), l.id
	if e.Name = printable(e.Name); len(e.Name) > 300 {
		e.Name = e.Name[:300]
	}
	same := l.last
	same.Time, same.Missed = e.Time, 0
	if same == e && e.Time.Sub(l.last.Time) < time.Second || !l.bucket.take(eventRate, eventBurst) {
		l.missed++
		return nil
	}
	e.Missed = l.missed
	line, err := json.Marshal(e)
	if err != nil {
		return err
	}
	if err := l.write(append(line, '\n')); err != nil {
		return fmt.Errorf("write the events of %s: %w", l.id, err)
	}
	l.last, l.missed = e, 0
	return nil
}

// close ends the log: the sandbox is gone, and its file is about to be.
func (l *eventLog) close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.closed = true
}

func (l *eventLog) write(line []byte) error {
	path := LogPath(l.dir, l.id)
	st, err := os.Lstat(path)
	switch {
	case errors.Is(err, os.ErrNotExist):
		err = nil
	case err == nil && st.Size()+int64(len(line)) > logLimit:
		err = os.Rename(path, olderPath(l.dir, l.id))
	}
	if err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(line)
	return errors.Join(err, f.Close())
}

// printable takes out of a name what a terminal would obey.
func printable(s string) string {
	return string(bytes.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, []byte(s)))
}

// ReadEvents hands a sandbox's events, oldest first, to each. A line that was
// cut off by a crash is passed over.
func ReadEvents(dir, id string, each func(Event) error) error {
	for _, path := range []string{olderPath(dir, id), LogPath(dir, id)} {
		f, err := os.Open(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return err
		}
		err = readLines(io.LimitReader(f, 2*logLimit), each)
		if err := errors.Join(err, f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// FollowEvents is ReadEvents, but goes on with those to come until ctx ends.
func FollowEvents(ctx context.Context, dir, id string, each func(Event) error) error {
	var last time.Time
	tick := time.NewTicker(followEvery)
	defer tick.Stop()
	for {
		// All of it again: it is little, and the files change places.
		err := ReadEvents(dir, id, func(e Event) error {
			if !e.Time.After(last) {
				return nil
			}
			last = e.Time
			return each(e)
		})
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

const followEvery = 500 * time.Millisecond

func readLines(r io.Reader, each func(Event) error) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, eventSize)
	for lines.Scan() {
		var e Event
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		if err := each(e); err != nil {
			return err
		}
	}
	return lines.Err()
}

// bucket allows so many per second after a burst.
type bucket struct {
	level float64
	at    time.Time
}

func (b *bucket) take(rate, burst float64) bool {
	now := time.Now()
	if b.at.IsZero() {
		b.level = burst
	} else {
		b.level = min(burst, b.level+now.Sub(b.at).Seconds()*rate)
	}
	b.at = now
	if b.level < 1 {
		return false
	}
	b.level--
	return true
}

func addrPort(a netip.AddrPort) string {
	if a.Port() == 0 {
		return a.Addr().String()
	}
	return a.String()
}
