package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strings"
)

// checkMembers refuses what encoding/json accepts: a duplicate member, of which the last
// counts, and one that differs from its name in case, which counts as that name. A policy
// that judged the request before us may have read the other one. data has been decoded
// into a value of the type.
func checkMembers(data []byte, t reflect.Type) error {
	return walkMembers(json.NewDecoder(bytes.NewReader(data)), t)
}

var unmarshaler = reflect.TypeFor[json.Unmarshaler]()

// walkMembers checks the next value; t may be nil, for one of any type.
func walkMembers(dec *json.Decoder, t reflect.Type) error {
	tok, err := dec.Token()
	if err != nil {
		return err
	}
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t != nil && reflect.PointerTo(t).Implements(unmarshaler) {
		t = nil // it sees to its members
	}
	switch tok {
	case json.Delim('{'):
		var names map[string]reflect.Type
		if t != nil && t.Kind() == reflect.Struct {
			names = memberTypes(t)
		}
		seen := map[string]bool{}
		for dec.More() {
			key, err := dec.Token()
			if err != nil {
				return err
			}
			name := key.(string) // nothing else can be a key
			of, known := names[name]
			switch {
			case seen[name]:
				return fmt.Errorf("json: field %.100q twice", name)
			case names != nil && !known:
				return fmt.Errorf("json: unknown field %.100q", name)
			case t != nil && t.Kind() == reflect.Map:
				of = t.Elem()
			}
			seen[name] = true
			if err := walkMembers(dec, of); err != nil {
				return err
			}
		}
	case json.Delim('['):
		var of reflect.Type
		if t != nil && (t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			of = t.Elem()
		}
		for dec.More() {
			if err := walkMembers(dec, of); err != nil {
				return err
			}
		}
	default:
		return nil
	}
	_, err = dec.Token() // the end of it
	return err
}

// memberTypes are the types of a struct's members by their names in JSON.
func memberTypes(t reflect.Type) map[string]reflect.Type {
	names := map[string]reflect.Type{}
	for _, f := range reflect.VisibleFields(t) {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		switch {
		case name == "-", !f.IsExported(), f.Anonymous && name == "":
		case name == "":
			names[f.Name] = f.Type
		default:
			names[name] = f.Type
		}
	}
	return names
}
