package store

import (
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/agentbox/agentbox/internal/fault"
)

// Bounds of what a caller may store. They only keep mistakes and malice out.
const (
	maxName       = 128
	maxLabels     = 256
	maxLabelKey   = 256
	maxLabelValue = 4096
	maxTrigger    = 256
	maxMessage    = 1000
	maxSpec       = 4 << 20
	maxError      = 4096
	idLen         = 32
)

// NewID returns a fresh id: 32 random lower-case hex digits.
func NewID() string {
	var b [idLen / 2]byte
	rand.Read(b[:])
	return hex.EncodeToString(b[:])
}

// ValidName reports whether s can name a sandbox, a checkpoint or a lock:
// [a-zA-Z0-9][a-zA-Z0-9_.-]*, at most 128 bytes, and not the form of an id.
func ValidName(s string) error {
	if err := plainName(s); err != nil {
		return err
	}
	if isID(s) {
		return fmt.Errorf("name %q has the form of an id; choose another: %w", s, fault.ErrInvalid)
	}
	return nil
}

// reserved means states and places where a checkpoint can be named, or may come to.
var reserved = []string{"head", "image", "latest", "now", "undo"}

// ValidCheckpointName returns an error if a checkpoint cannot be given the name or tag s.
// Checkpoints from earlier versions keep other names.
func ValidCheckpointName(s string) error {
	if slices.Contains(reserved, strings.ToLower(s)) {
		return &fault.Error{Hint: "Choose another name; reserved are " + strings.Join(reserved, ", ") + ".",
			Err: fmt.Errorf("%w: the name %q is reserved: it means a state of a sandbox, not a checkpoint",
				fault.ErrInvalid, s)}
	}
	return ValidName(s)
}

// validSandboxName allows plain names and those of adopted containers: BACKEND://NAME.
func validSandboxName(s string) error {
	backend, name, ok := strings.Cut(s, "://")
	if !ok {
		return plainName(s)
	}
	if err := plainName(backend); err != nil {
		return err
	}
	for part := range strings.SplitSeq(name, "/") {
		if err := plainName(part); err != nil {
			return err
		}
	}
	return nil
}

func plainName(s string) error {
	switch {
	case s == "":
		return fmt.Errorf("the name is empty: %w", fault.ErrInvalid)
	case len(s) > maxName:
		return fmt.Errorf("name %q... is %d bytes long, %d are allowed: %w", s[:32], len(s), maxName, fault.ErrInvalid)
	}
	for i := 0; i < len(s); i++ {
		c := s[i]
		switch {
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9':
		case i > 0 && (c == '_' || c == '.' || c == '-'):
		default:
			return fmt.Errorf("name %q: only letters, digits, '_', '.' and '-' are allowed, a letter or digit first: %w", s, fault.ErrInvalid)
		}
	}
	return nil
}

func isID(s string) bool { return len(s) == idLen && isHex(s) }

// minPrefix is from how many digits on a text can mean an id: a short name of what was
// removed must not lead to something else.
const minPrefix = 4

func isPrefix(s string) bool { return len(s) >= minPrefix && isHex(s) }

func isHex(s string) bool {
	for i := 0; i < len(s); i++ {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return s != ""
}

func checkID(what, id string) error {
	if !isID(id) {
		return fmt.Errorf("%s id %q is not %d lower-case hex digits: %w", what, id, idLen, fault.ErrInvalid)
	}
	return nil
}

// ValidLabels reports whether labels can be stored: at most 256, keys of 1 to
// 256 bytes without '=' or control characters, values of at most 4096 bytes of UTF-8.
func ValidLabels(labels map[string]string) error {
	if len(labels) > maxLabels {
		return fmt.Errorf("%d labels, %d are allowed: %w", len(labels), maxLabels, fault.ErrInvalid)
	}
	for k, v := range labels {
		if k == "" || len(k) > maxLabelKey || !isPrintable(k, "=") {
			return fmt.Errorf("label %.64q: a key has 1 to %d bytes of text without '=': %w", k,
				maxLabelKey, fault.ErrInvalid)
		}
		if len(v) > maxLabelValue || !utf8.ValidString(v) {
			return fmt.Errorf("label %q: a value has at most %d bytes of UTF-8: %w", k, maxLabelValue, fault.ErrInvalid)
		}
	}
	return nil
}

// ValidMessage reports whether a checkpoint can be given a message: at most 1000 bytes of UTF-8,
// without control characters other than newlines and tabs.
func ValidMessage(s string) error {
	if len(s) > maxMessage || !isPrintable(strings.NewReplacer("\n", "", "\t", "").Replace(s), "") {
		return fmt.Errorf("message %.64q: at most %d bytes of text: %w", s, maxMessage, fault.ErrInvalid)
	}
	return nil
}

func isPrintable(s, except string) bool {
	if !utf8.ValidString(s) {
		return false
	}
	for _, r := range s {
		if unicode.IsControl(r) {
			return false
		}
		for _, e := range except {
			if r == e {
				return false
			}
		}
	}
	return true
}

func validSpec(spec json.RawMessage) error {
	if len(spec) > maxSpec {
		return fmt.Errorf("the spec has %d bytes, %d are allowed: %w", len(spec), maxSpec, fault.ErrInvalid)
	}
	if len(spec) > 0 && (!json.Valid(spec) || !utf8.Valid(spec)) {
		return fmt.Errorf("the spec is not JSON: %w", fault.ErrInvalid)
	}
	return nil
}
