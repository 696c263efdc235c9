package main

import (
	"context"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/coreos/go-systemd/v22/journal"
)

// logger is the log of the service: to the journal, with fields, where stderr is
// that, and else as lines.
func (a *app) logger() *slog.Logger {
	if there, err := journal.StderrIsJournalStream(); err == nil && there && a.stderr == os.Stderr {
		return slog.New(&journalHandler{})
	}
	return slog.New(slog.NewTextHandler(a.stderr, nil))
}

// journalHandler sends records to the journal. Attributes are fields too: sandbox
// is SANDBOX, client_uid is CLIENT_UID.
type journalHandler struct {
	group string
	attrs []slog.Attr // with their groups in their keys
}

func (h *journalHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h *journalHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	with := &journalHandler{group: h.group, attrs: h.attrs[:len(h.attrs):len(h.attrs)]}
	for _, a := range attrs {
		with.attrs = append(with.attrs, flat(h.group, a)...)
	}
	return with
}

func (h *journalHandler) WithGroup(name string) slog.Handler {
	if name != "" {
		name = h.group + name + "_"
	}
	return &journalHandler{group: name, attrs: h.attrs}
}

// flat is an attribute without groups.
func flat(prefix string, a slog.Attr) []slog.Attr {
	v := a.Value.Resolve()
	if v.Kind() != slog.KindGroup {
		return []slog.Attr{{Key: prefix + a.Key, Value: v}}
	}
	var all []slog.Attr
	for _, one := range v.Group() {
		all = append(all, flat(prefix+a.Key+"_", one)...)
	}
	return all
}

func (h *journalHandler) Handle(_ context.Context, r slog.Record) error {
	attrs := h.attrs[:len(h.attrs):len(h.attrs)]
	r.Attrs(func(a slog.Attr) bool {
		attrs = append(attrs, flat(h.group, a)...)
		return true
	})
	// The message has them as well, for readers that show only the message.
	text := &strings.Builder{}
	line := slog.NewRecord(time.Time{}, r.Level, "", 0)
	line.AddAttrs(attrs...)
	plain := slog.NewTextHandler(text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.LevelKey || a.Key == slog.MessageKey && a.Value.String() == "" {
			return slog.Attr{}
		}
		return a
	}})
	if err := plain.Handle(context.Background(), line); err != nil {
		return err
	}
	fields := map[string]string{}
	for _, a := range attrs {
		if name := fieldName(a.Key); name != "" {
			fields[name] = a.Value.String()
		}
	}
	return journal.Send(strings.TrimSpace(r.Message+" "+text.String()), priority(r.Level), fields)
}

// fieldName is a key as the journal takes it; empty: it would not, or has it for
// something else.
func fieldName(key string) string {
	name := strings.Map(func(r rune) rune {
		switch {
		case 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
			return r
		case 'a' <= r && r <= 'z':
			return r - 'a' + 'A'
		}
		return '_'
	}, key)
	name = strings.TrimLeft(name, "_0123456789")
	switch name {
	case "MESSAGE", "PRIORITY":
		return ""
	}
	return name[:min(len(name), 64)]
}

func priority(l slog.Level) journal.Priority {
	switch {
	case l >= slog.LevelError:
		return journal.PriErr
	case l >= slog.LevelWarn:
		return journal.PriWarning
	}
	return journal.PriInfo
}
