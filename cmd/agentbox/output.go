package main

import (
	"encoding/json"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/docker/go-units"

	"github.com/agentbox/agentbox/runtime"
)

// printJSON prints v as a script wants it: one document, stable order.
func printJSON(w io.Writer, v any) error {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	return enc.Encode(v)
}

// documented makes sure that the maps and lists the documentation promises
// are {} and [] rather than null.
func documented(sb runtime.Sandbox) runtime.Sandbox {
	if sb.Labels == nil {
		sb.Labels = map[string]string{}
	}
	if sb.Spec.Args == nil {
		sb.Spec.Args = []string{}
	}
	return sb
}

func documentedCheckpoint(c runtime.Checkpoint) runtime.Checkpoint {
	if c.Labels == nil {
		c.Labels = map[string]string{}
	}
	return c
}

// notNull is list, but never null in JSON.
func notNull[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// oneLine is printable for what must stay on its line.
func oneLine(s string) string {
	return strings.NewReplacer("\t", " ", "\n", " ").Replace(printable(s))
}

// shortID is what people read and type; all verbs take it as a prefix.
func shortID(id string) string {
	if len(id) > 12 {
		return id[:12]
	}
	return id
}

// idText returns how a list prints ids: short, unless all of it is asked for.
func idText(whole bool) func(id string) string {
	if whole {
		return func(id string) string { return id }
	}
	return shortID
}

// shortDigest keeps the algorithm and 12 digits.
func shortDigest(digest string) string {
	algorithm, hex, found := strings.Cut(digest, ":")
	if !found {
		return shortID(digest)
	}
	return algorithm + ":" + shortID(hex)
}

// shorten cuts s to at most n characters.
func shorten(s string, n int) string {
	if utf8.RuneCountInString(s) <= n {
		return s
	}
	return string([]rune(s)[:n-1]) + "…"
}

func quotedCommand(args []string, full bool) string {
	s := strings.Join(args, " ")
	if !full {
		s = shorten(s, 20)
	}
	return strconv.Quote(s)
}

func ago(now, t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return units.HumanDuration(max(0, now.Sub(t))) + " ago"
}

func statusText(now time.Time, sb runtime.Sandbox) string {
	if w := sb.Work; w != nil {
		verb := "Checkpointing"
		if w.Verb == "restore" {
			verb = "Restoring"
		}
		return fmt.Sprintf("%s %d s", verb, int(max(0, now.Sub(w.Since)).Seconds())) + expiryText(now, sb)
	}
	up := "Up"
	if !sb.Started.IsZero() {
		up += " " + units.HumanDuration(max(0, now.Sub(sb.Started)))
	}
	switch sb.Status {
	case runtime.Created:
		return "Created" + expiryText(now, sb)
	case runtime.Running:
		return up + expiryText(now, sb)
	case runtime.Paused:
		return up + " (Paused)" + expiryText(now, sb)
	case runtime.Exited:
		return strings.TrimSpace(fmt.Sprintf("Exited (%d) %s", sb.ExitCode,
			ago(now, sb.Finished))) + expiryText(now, sb)
	default:
		return string(sb.Status)
	}
}

func expiryText(now time.Time, sb runtime.Sandbox) string {
	switch {
	case sb.Held != "":
		return ", held"
	case sb.Expired:
		return ", expired"
	case sb.Expires.IsZero():
		return ""
	}
	return ", expires in " + strings.ToLower(units.HumanDuration(max(0, sb.Expires.Sub(now))))
}

func portsText(ports []runtime.Port) string {
	var out []string
	for _, p := range ports {
		ip := p.HostIP
		switch {
		case ip == "":
			ip = "0.0.0.0"
		case strings.Contains(ip, ":"):
			ip = "[" + ip + "]"
		}
		out = append(out, fmt.Sprintf("%s:%d->%d/%s", ip, p.Host, p.Sandbox, p.Protocol))
	}
	return strings.Join(out, ", ")
}

// sizeText is decimal, as Docker's.
func sizeText(n int64) string { return units.HumanSizeWithPrecision(float64(n), 3) }

// countText is "1 file", "3 files", "2 processes", "2 entries".
func countText(n int64, one string) string {
	switch {
	case n == 1:
		return "1 " + one
	case strings.HasSuffix(one, "s"):
		one += "es"
	case strings.HasSuffix(one, "y"):
		one = strings.TrimSuffix(one, "y") + "ies"
	default:
		one += "s"
	}
	return fmt.Sprintf("%d %s", n, one)
}

// durationText rounds to what a person reads.
func durationText(d time.Duration) string {
	switch {
	case d >= 10*time.Second:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(10 * time.Millisecond).String()
	case d >= time.Millisecond:
		return fmt.Sprintf("%d ms", d.Milliseconds())
	default:
		return fmt.Sprintf("%d µs", d.Microseconds())
	}
}

func warn(w io.Writer, warnings []string) {
	for _, s := range warnings {
		fmt.Fprintf(w, "warning: %s\n", printable(s))
	}
}
