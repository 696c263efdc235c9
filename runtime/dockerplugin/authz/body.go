package authz

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"unicode"
)

const maxDepth = 64

// freeKeys are the objects whose keys users choose: "a" and "A" are two there.
var freeKeys = []string{"annotations", "auxiliaryaddresses", "config", "driveropts", "endpointsconfig",
	"exposedports", "labels",
	"options", "portbindings", "storageopt", "sysctls", "tmpfs", "volumes"}

// errUnknownField is wrapped by the error for a field that the judge does not know.
var errUnknownField = errors.New("unknown field")

// decode reads a body into v as the daemon does: encoding/json, the daemon's
// own types, keys in any case. Where that leaves room for doubt it is an
// error: nothing there, something after the value, a key given twice (decoders
// differ in what they make of it), a field that the shape does not have (nil
// has all).
func decode(body []byte, v any, s *shape) error {
	if len(bytes.TrimSpace(body)) == 0 {
		return errors.New("dockerd did not send the body along, as it does for bodies over 1 MiB and those not declared as JSON")
	}
	if err := twice(body); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(body))
	if err := dec.Decode(v); err != nil {
		return fmt.Errorf("the body is not what the call takes: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return errors.New("something follows the JSON value in the body")
	}
	if s == nil {
		return nil
	}
	var all any
	if err := json.Unmarshal(body, &all); err != nil {
		return fmt.Errorf("the body is no JSON: %s", strings.TrimPrefix(err.Error(), "json: "))
	}
	if bad := s.unknownField(all, ""); bad != "" {
		return fmt.Errorf("%w %s: the judge has not decided about it", errUnknownField, quote(bad))
	}
	return nil
}

// twice is an error if an object of the body has a key twice, where case does
// not count unless the object is one of freeKeys.
func twice(body []byte) error {
	type frame struct {
		keys   map[string]bool // nil: an array
		exact  bool
		isNext bool // the next token is a key
		name   string
	}
	var stack []frame
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	for {
		tok, err := dec.Token()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("the body is no JSON: %s", strings.TrimPrefix(err.Error(), "json: "))
		}
		var top *frame
		if len(stack) > 0 {
			top = &stack[len(stack)-1]
		}
		if key, ok := tok.(string); ok && top != nil && top.isNext {
			top.name, top.isNext = fold(key), false
			id := top.name
			if top.exact {
				id = key
			}
			if top.keys[id] {
				return fmt.Errorf("the body has the key %s twice", quote(key))
			}
			top.keys[id] = true
			continue
		}
		delim, _ := tok.(json.Delim)
		switch delim {
		case '{', '[':
			if len(stack) == maxDepth {
				return fmt.Errorf("the body is nested deeper than %d", maxDepth)
			}
			f := frame{}
			if delim == '{' {
				f.keys, f.isNext = map[string]bool{}, true
				f.exact = top != nil && slices.Contains(freeKeys, top.name)
			}
			if top != nil && top.keys != nil {
				top.isNext = true // after this value
			}
			stack = append(stack, f)
			continue
		case '}', ']':
			stack = stack[:len(stack)-1]
			continue
		}
		if top != nil && top.keys != nil {
			top.isNext = true
		}
	}
}

// fold maps keys to one string that encoding/json takes for the same field;
// among them "ſ" for "s" and the Kelvin sign for "k".
func fold(key string) string {
	return strings.Map(func(r rune) rune {
		least := r
		for next := unicode.SimpleFold(r); next != r; next = unicode.SimpleFold(next) {
			least = min(least, next)
		}
		return unicode.ToLower(least)
	}, key)
}

// quote makes what a caller sent fit for a message and a log.
func quote(s string) string {
	const most = 200
	if len(s) > most {
		s = s[:most] + "..."
	}
	return fmt.Sprintf("%q", s)
}
