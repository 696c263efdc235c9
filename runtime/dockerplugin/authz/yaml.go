package authz

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/agentbox/agentbox/internal/fault"
)

// Parse reads a policy. An error begins with LINE:COLUMN: and is
// fault.ErrInvalid.
func Parse(data []byte) (*Policy, error) {
	dec := yaml.NewDecoder(bytes.NewReader(data))
	var doc yaml.Node
	p := &Policy{}
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return p, nil // empty, or comments only
	} else if err != nil {
		return nil, syntax(err)
	}
	var more yaml.Node
	if err := dec.Decode(&more); err == nil {
		return nil, wrong(&more, "a second document; a policy is one")
	} else if !errors.Is(err, io.EOF) {
		return nil, syntax(err)
	}
	if err := fill(doc.Content[0], "", reflect.ValueOf(p).Elem()); err != nil {
		return nil, err
	}
	return p, nil
}

// fill is a decoder by hand, since the library's reports no columns, and takes "yes" for a
// string and null for anything.
func fill(n *yaml.Node, key string, into reflect.Value) error {
	if n.Kind == yaml.AliasNode || n.Anchor != "" {
		return wrong(n, "anchors and aliases are not for policies")
	}
	if n.Kind == yaml.ScalarNode && n.Tag == "!!null" {
		return nil // "devices:" with nothing behind it: the default
	}
	switch into.Kind() {
	case reflect.Pointer:
		into.Set(reflect.New(into.Type().Elem()))
		return fill(n, key, into.Elem())
	case reflect.Bool:
		if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
			return wrong(n, "%s: neither true nor false", key)
		}
		return n.Decode(into.Addr().Interface())
	case reflect.String:
		if n.Kind != yaml.ScalarNode {
			return wrong(n, "%s: not a string", key)
		}
		if why := checkValue(key, n.Value); why != "" {
			return wrong(n, "%s: %s", key, why)
		}
		into.SetString(n.Value)
		return nil
	case reflect.Slice:
		if n.Kind != yaml.SequenceNode {
			return wrong(n, "%s: not a list", key)
		}
		list := reflect.MakeSlice(into.Type(), 0, len(n.Content))
		for _, item := range n.Content {
			if item.Kind == yaml.ScalarNode && item.Tag == "!!null" {
				return wrong(item, "%s: an empty item", key)
			}
			v := reflect.New(into.Type().Elem()).Elem()
			if err := fill(item, key, v); err != nil {
				return err
			}
			list = reflect.Append(list, v)
		}
		into.Set(list)
		return nil
	case reflect.Struct:
		return fillStruct(n, key, into)
	}
	panic("authz: a policy has no " + into.Kind().String())
}

func fillStruct(n *yaml.Node, key string, into reflect.Value) error {
	if n.Kind != yaml.MappingNode {
		if key == "" {
			return wrong(n, "a policy is a mapping of keys to values")
		}
		return wrong(n, "%s: not a mapping", key)
	}
	seen := map[string]bool{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		name := n.Content[i]
		full := strings.TrimPrefix(key+"."+name.Value, ".")
		field, known := fieldOf(into, name.Value)
		switch {
		case name.Kind != yaml.ScalarNode || !known:
			return wrong(name, "unknown key %q; known are %s", full, strings.Join(keysOf(into), ", "))
		case seen[name.Value]:
			return wrong(name, "the key %q stands here a second time", full)
		}
		seen[name.Value] = true
		if err := fill(n.Content[i+1], full, field); err != nil {
			return err
		}
	}
	return nil
}

func fieldOf(v reflect.Value, name string) (reflect.Value, bool) {
	for i := range v.NumField() {
		if v.Type().Field(i).Tag.Get("yaml") == name {
			return v.Field(i), true
		}
	}
	return reflect.Value{}, false
}

func keysOf(v reflect.Value) (keys []string) {
	for i := range v.NumField() {
		keys = append(keys, v.Type().Field(i).Tag.Get("yaml"))
	}
	return keys
}

func wrong(n *yaml.Node, format string, args ...any) error {
	return fmt.Errorf("%d:%d: %w: %s", n.Line, n.Column, fault.ErrInvalid, fmt.Sprintf(format, args...))
}

// syntax formats an error of the library, "yaml: line 3: ...", like the others.
func syntax(err error) error {
	why := strings.TrimPrefix(err.Error(), "yaml: ")
	line := 1
	if rest, ok := strings.CutPrefix(why, "line "); ok {
		if n, text, ok := strings.Cut(rest, ": "); ok {
			if at, err := strconv.Atoi(n); err == nil {
				line, why = at, text
			}
		}
	}
	return fmt.Errorf("%d:1: %w: %s", line, fault.ErrInvalid, why)
}
