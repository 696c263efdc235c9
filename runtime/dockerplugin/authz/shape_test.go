package authz

import (
	"encoding"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"
	"testing"

	checkpoint28 "github.com/docker/docker/api/types/checkpoint"
	container28 "github.com/docker/docker/api/types/container"
	network28 "github.com/docker/docker/api/types/network"
	registry28 "github.com/docker/docker/api/types/registry"
	volume28 "github.com/docker/docker/api/types/volume"
	checkpoint29 "github.com/moby/moby/api/types/checkpoint"
	container29 "github.com/moby/moby/api/types/container"
	network29 "github.com/moby/moby/api/types/network"
	registry29 "github.com/moby/moby/api/types/registry"
	volume29 "github.com/moby/moby/api/types/volume"
)

// bodies are the types that the engines 28 and 29 decode the bodies of each
// shape with, and what only older engines and clients know.
var bodies = map[string]struct {
	types []any
	older []string
}{
	"create": {types: []any{
		container28.CreateRequest{}, container29.CreateRequest{}, container28.HostConfig{}, container29.HostConfig{},
	},
		older: []string{"Cpuset"}},
	"start":  {types: []any{container28.HostConfig{}, container29.HostConfig{}}},
	"update": {types: []any{container28.UpdateConfig{}, container29.UpdateConfig{}}},
	"commit": {types: []any{container28.Config{}, container29.Config{}}},
	"exec": {
		types: []any{container28.ExecOptions{}, container29.ExecCreateRequest{}}, older: []string{"Container"},
	},
	"exec start": {types: []any{container28.ExecStartOptions{}, container29.ExecStartRequest{}}},
	"checkpoint": {types: []any{checkpoint28.CreateOptions{}, checkpoint29.CreateRequest{}}},
	"volume":     {types: []any{volume28.CreateOptions{}, volume29.CreateRequest{}}},
	"network":    {types: []any{network28.CreateRequest{}, network29.CreateRequest{}}},
	"connect":    {types: []any{network28.ConnectOptions{}, network29.ConnectRequest{}}},
	"disconnect": {types: []any{network28.DisconnectOptions{}, network29.DisconnectRequest{}}},
	"auth":       {types: []any{registry28.AuthConfig{}, registry29.AuthConfig{}}},
	"copy":       {older: []string{"Resource"}},
	"nothing":    {},
}

// TestShapes has every field of the engines' own types decided, and none that
// no engine has.
func TestShapes(t *testing.T) {
	if have, want := slices.Sorted(maps.Keys(shapes())), slices.Sorted(maps.Keys(bodies)); !slices.Equal(have, want) {
		t.Fatalf("the shapes are %q, those looked at %q", have, want)
	}
	for name, b := range bodies {
		seen := map[*shape]bool{}
		for _, v := range b.types {
			walk(t, shapes()[name], reflect.TypeOf(v), name, seen)
		}
		for _, old := range b.older {
			seen[shapes()[name].fields[fold(old)]] = true
		}
		idle(t, shapes()[name], name, seen)
	}
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

// plain looks through pointers and lists, and reports whether what is there is
// written as one value.
func plain(typ reflect.Type) (reflect.Type, bool) {
	for {
		if typ.Implements(jsonMarshaler) || typ.Implements(textMarshaler) {
			return typ, true
		}
		switch typ.Kind() {
		case reflect.Pointer, reflect.Slice, reflect.Array:
			typ = typ.Elem()
		case reflect.Struct, reflect.Map:
			return typ, false
		default:
			return typ, true
		}
	}
}

func walk(t *testing.T, s *shape, typ reflect.Type, at string, seen map[*shape]bool) {
	typ, leaf := plain(typ)
	switch {
	case leaf && s.fields != nil:
		t.Errorf("%s is one value, and an object for the judge", at)
	case leaf:
	case s.fields == nil || s.keyed != (typ.Kind() == reflect.Map):
		t.Errorf("%s is a %s, and not so for the judge", at, typ)
	case s.keyed:
		if elem, leaf := plain(typ.Elem()); !leaf && elem.NumField() > 0 {
			walk(t, &shape{fields: s.fields}, elem, at, seen)
		}
	default:
		for i := range typ.NumField() {
			field := typ.Field(i)
			name, _, _ := strings.Cut(field.Tag.Get("json"), ",")
			switch {
			case !field.IsExported() || name == "-":
				continue
			case field.Anonymous && name == "":
				walk(t, s, field.Type, at, seen)
				continue
			case name == "":
				name = field.Name
			}
			next := s.fields[fold(name)]
			if next == nil {
				t.Errorf("%s.%s is not decided about: judge it, or list it as harmless", at, name)
				continue
			}
			if next.name != name {
				t.Errorf("%s.%s is listed as %s", at, name, next.name)
			}
			seen[next] = true
			walk(t, next, field.Type, at+"."+name, seen)
		}
	}
}

func idle(t *testing.T, s *shape, at string, seen map[*shape]bool) {
	for _, next := range s.fields {
		if !seen[next] {
			t.Errorf("%s.%s is a field of no engine", at, next.name)
		}
		idle(t, next, at+"."+next.name, seen)
	}
}

// TestJudgedFields has a refusal for each field that is said to be judged.
func TestJudgedFields(t *testing.T) {
	refused := map[string]bool{}
	for _, c := range cases {
		var body any
		if c.key != "ok" && c.key != "unknown_fields" && json.Unmarshal(text(c.body, "/top"), &body) == nil {
			names(body, refused)
		}
	}
	var look func(s *shape, at string)
	look = func(s *shape, at string) {
		for _, next := range s.fields {
			if next.judged && !refused[fold(next.name)] {
				t.Errorf("%s.%s is judged, and no case of the test is refused for it", at, next.name)
			}
			look(next, at+"."+next.name)
		}
	}
	for name, s := range shapes() {
		look(s, name)
	}
}

func names(v any, into map[string]bool) {
	switch v := v.(type) {
	case []any:
		for _, item := range v {
			names(item, into)
		}
	case map[string]any:
		for key, value := range v {
			into[fold(key)] = true
			names(value, into)
		}
	}
}
