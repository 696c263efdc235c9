package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// limit: the value in a request has to be within the maximum; a request without one gets the
// default, or else the maximum.
func limit[T int64 | float64](j *judging, name string, ask *T, l Limit[T], text func(T) string) {
	switch key := "limits." + name; {
	case *ask > 0 && l.Max > 0:
		j.note(verdict(*ask <= l.Max), name+" "+text(*ask), key+".max", text(l.Max))
	case *ask > 0:
		j.note(Allowed, name+" "+text(*ask), key+".max", "none")
	case l.Default > 0:
		*ask = l.Default
		j.note(Clamped, name+" "+text(*ask), key+".default", text(l.Default))
	case l.Max > 0:
		*ask = l.Max
		j.note(Clamped, name+" "+text(*ask), key+".max", text(l.Max))
	}
}

// swap differs from the other limits: a request without one gets the least.
func (j *judging) swap() {
	l := j.Rules.Swap
	switch ask := &j.ask.Swap; {
	case *ask < 0 && l.Max > 0:
		j.note(Denied, "swap without limit", "limits.swap.max", sizeText(l.Max))
	case *ask > 0 || *ask == 0 && l.Default > 0:
		limit(j, "swap", ask, l, sizeText)
	}
}

// lifetime: the value in a request has to be within the maximum, which also applies to a request
// without one.
func (j *judging) lifetime(name string, ask *time.Duration, most time.Duration) {
	switch key := "lifetime." + name; {
	case *ask > 0 && most > 0:
		j.note(verdict(*ask <= most), name+" "+short(*ask), key, short(most))
	case *ask > 0:
		j.note(Allowed, name+" "+short(*ask), key, "none")
	case most > 0:
		*ask = most
		j.note(Clamped, name+" "+short(most), key, short(most))
	}
}

// MayLive judges how long a sandbox that is there is to live, from now on, or to
// be idle; nil: it is not changed, 0: without bound.
func (p *Policy) MayLive(ttl, idle *time.Duration) error {
	j := &judging{Policy: p}
	for _, c := range []struct {
		name string
		ask  *time.Duration
		most time.Duration
	}{{"ttl", ttl, p.Rules.TTL}, {"idle", idle, p.Rules.Idle}} {
		switch {
		case c.ask == nil:
		case *c.ask == 0 && c.most > 0:
			j.note(Denied, "no "+c.name, "lifetime."+c.name, short(c.most))
		default:
			d := *c.ask
			j.lifetime(c.name, &d, c.most)
		}
	}
	return Denials(j.findings)
}

// MayStore judges what the files of a sandbox that is there are to take; 0: any number of bytes.
func (p *Policy) MayStore(size int64) error {
	j := &judging{Policy: p}
	if most := p.Rules.StorageSize.Max; size == 0 && most > 0 {
		j.note(Denied, "no storage_size", "limits.storage_size.max", sizeText(most))
	} else if size > 0 {
		limit(j, "storage_size", &size, p.Rules.StorageSize, sizeText)
	}
	return Denials(j.findings)
}

func (j *judging) checkpoints() {
	r := &j.Rules
	if j.ask.Every == "" {
		if j.ask.Every = r.Every; r.Every != "" {
			j.note(Clamped, "checkpoints every "+r.Every, "checkpoints.every", r.Every)
		}
		return
	}
	_, ok := r.allowsEvery(j.ask.Every)
	j.note(verdict(ok), "checkpoints every "+j.ask.Every, "checkpoints.triggers", listText(r.Triggers))
}

func (j *judging) labels() {
	for _, want := range j.Rules.Labels {
		name, pattern, valued := strings.Cut(want, "=")
		value, ok := j.ask.Labels[name]
		ok = ok && (!valued || matches(pattern, value))
		f := j.note(verdict(ok), "labels "+listText(slices.Sorted(maps.Keys(j.ask.Labels))), "labels", want)
		if !ok {
			f.Hint = fmt.Sprintf("Give it: --label %s=VALUE.", name)
		}
	}
}

// hooks says what is run besides.
func (j *judging) hooks() {
	for _, point := range hookPoints {
		for _, h := range j.Rules.Hooks[point] {
			j.note(Clamped, "hook "+h.Run[0], "hooks."+point, fmt.Sprintf("[%s] within %s", h, short(h.Timeout)))
		}
	}
}
