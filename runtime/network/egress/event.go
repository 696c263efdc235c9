package egress

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/agentbox/agentbox/runtime/eventlog"
)

// Event is one denied attempt, or one that failed for a reason of ours, as the
// log has it. It only ever grows.
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
	eventRate  = 20 // per second, after the first eventBurst
	eventBurst = 200
)

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
	if e.Name = asciiOnly(e.Name); len(e.Name) > 300 {
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
	if err := eventlog.Append(l.dir, l.id, append(line, '\n')); err != nil {
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

// asciiOnly takes out of a name what a terminal would obey.
func asciiOnly(s string) string {
	return string(bytes.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return '?'
		}
		return r
	}, []byte(s)))
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
