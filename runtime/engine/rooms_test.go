package engine

import (
	"reflect"
	"testing"

	"github.com/agentbox/agentbox/runtime/store"
)

// TestRoomsAreFurnished: every room has all that it names.
func TestRoomsAreFurnished(t *testing.T) {
	e := reflect.ValueOf(New(Options{Store: new(store.Store)})).Elem()
	rooms := 0
	for i := range e.NumField() {
		room := e.Field(i)
		if verbs := room; verbs.Kind() == reflect.Struct {
			if verbs.NumField() != 1 || verbs.Field(0).Pointer() != e.Addr().Pointer() {
				t.Errorf("%s is not the Engine's", verbs.Type())
			}
			continue
		}
		if room.Kind() != reflect.Pointer || room.IsNil() {
			t.Fatalf("Engine.%s is not set", e.Type().Field(i).Name)
		}
		rooms++
		for room, j := room.Elem(), 0; j < room.NumField(); j++ {
			if f := room.Field(j); f.Kind() == reflect.Pointer && f.IsNil() {
				t.Errorf("%s.%s is not set", room.Type(), room.Type().Field(j).Name)
			}
		}
	}
	if rooms < 10 {
		t.Errorf("%d rooms were looked at", rooms)
	}
}
