package server

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"os"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode"

	"github.com/danielgtaylor/huma/v2"
	"github.com/danielgtaylor/huma/v2/adapters/humago"
	"net/http"

	"github.com/agentbox/agentbox/policy"
	"github.com/agentbox/agentbox/runtime/api/wire"
)

var update = flag.Bool("update", false, "write openapi.json")

// policyDoc is a policy as its JSON has it.
type policyDoc struct {
	Name        string            `json:"name"`
	File        string            `json:"file"`
	Description string            `json:"description,omitempty"`
	Base        []string          `json:"base,omitempty"`
	Rules       map[string]any    `json:"rules"`
	Origin      map[string]origin `json:"origin,omitempty"`
}

type origin struct {
	Policy string `json:"policy"`
	File   string `json:"file"`
	Line   int    `json:"line"`
}

// schemaName is the name of a type, behind that of its package where that is
// neither runtime, wire nor this one.
func schemaName(t reflect.Type, hint string) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	name := huma.DefaultSchemaNamer(t, hint)
	pkg := t.PkgPath()[strings.LastIndex(t.PkgPath(), "/")+1:]
	switch {
	case pkg == "runtime", pkg == "wire", pkg == "server", pkg == "image" && strings.HasPrefix(name, "Source"):
		pkg = ""
	case pkg == "image":
		pkg = "images" // the document keeps the names that clients may know
	}
	upper := func(s string) string {
		if s == "" {
			return s
		}
		return string(unicode.ToUpper(rune(s[0]))) + s[1:]
	}
	return upper(pkg) + upper(name)
}

var inPath = regexp.MustCompile(`\{(\w+)\}`)

// document describes the routes.
func document(t *testing.T) []byte {
	h, err := New(nil, Options{})
	if err != nil {
		t.Fatal(err)
	}
	config := huma.DefaultConfig("agentbox", "1")
	config.Info.Description = "See docs/api.md. Members may be added to answers at any time; in requests unknown ones are refused."
	config.Components.Schemas = huma.NewMapRegistry("#/components/schemas/", schemaName)
	config.CreateHooks = nil // no member $schema
	config.FieldsOptionalByDefault = true
	reg := config.Components.Schemas
	reg.RegisterTypeAlias(reflect.TypeFor[policy.Policy](), reflect.TypeFor[policyDoc]())
	reg.RegisterTypeAlias(reflect.TypeFor[json.RawMessage](), reflect.TypeFor[any]())
	doc := humago.New(http.NewServeMux(), config).OpenAPI()
	schema := func(v reflect.Type) *huma.Schema { return reg.Schema(v, true, "") }
	for _, r := range h.routes() {
		op := &huma.Operation{
			Method: r.method, Path: r.path, Summary: r.summary, Responses: map[string]*huma.Response{},
		}
		op.OperationID = strings.ToLower(r.method) +
			inPath.ReplaceAllString(strings.ReplaceAll(strings.TrimPrefix(r.path, "/v1"), "/", "-"), "$1")
		for _, m := range inPath.FindAllStringSubmatch(r.path, -1) {
			op.Parameters = append(op.Parameters, &huma.Param{
				Name: m[1], In: "path", Required: true, Schema: &huma.Schema{Type: "string"},
			})
		}
		for _, q := range r.query {
			schema := &huma.Schema{Type: cmp.Or(queryTypes[q], "string")}
			if slices.Contains(queryLists, q) {
				schema = &huma.Schema{Type: "array", Items: schema}
			}
			op.Parameters = append(op.Parameters, &huma.Param{Name: q, In: "query", Schema: schema})
		}
		ok := &huma.Response{Description: "It is done.", Content: map[string]*huma.MediaType{}}
		session := r.event == reflect.TypeFor[wire.Message]()
		switch {
		case session:
			op.Description = "A websocket with the subprotocol " + wire.Subprotocol + "; see docs/api.md."
			ok.Description = "The session begins."
			ok.Content["application/json"] = &huma.MediaType{Schema: schema(r.event)}
		case r.stream != "" && r.out == nil:
			ok.Content[r.stream] = &huma.MediaType{Schema: &huma.Schema{Type: "string", Format: "binary"}}
			if r.path == "/metrics" {
				break
			}
			op.Parameters = append(op.Parameters, &huma.Param{
				Name: "TE", In: "header", Description: "trailers: how the stream ended comes as the trailer " +
					wire.TrailerStatus, Schema: &huma.Schema{Type: "string"},
			})
		case r.stream != "":
			op.RequestBody = &huma.RequestBody{
				Required: true, Content: map[string]*huma.MediaType{r.stream: {Schema: &huma.Schema{
					Type: "string", Format: "binary",
				}}},
			}
		}
		if r.in != nil && r.in != reflect.TypeFor[wire.None]() {
			op.RequestBody = &huma.RequestBody{Content: map[string]*huma.MediaType{"application/json": {Schema: schema(r.in)}}}
		}
		if r.method == http.MethodPost && r.stream == "" {
			op.Parameters = append(op.Parameters, &huma.Param{
				Name: wire.HeaderKey, In: "header",
				Description: "The same request with the same key is not done again.",
				Schema:      &huma.Schema{Type: "string"},
			})
		}
		if r.out != nil {
			ok.Content["application/json"] = &huma.MediaType{Schema: schema(r.out)}
		}
		if r.event != nil && !session {
			ok.Content[wire.EventStream] = &huma.MediaType{Schema: schema(r.event)}
		}
		code := "200"
		if session {
			code = strconv.Itoa(http.StatusSwitchingProtocols)
		}
		op.Responses[code] = ok
		op.Responses["default"] = &huma.Response{
			Description: "An error.",
			Content:     map[string]*huma.MediaType{"application/problem+json": {Schema: schema(reflect.TypeFor[wire.Problem]())}},
		}
		if other := doc.Paths[r.path]; other != nil && r.method == http.MethodGet && other.Get != nil {
			t.Fatalf("two routes at %s %s", r.method, r.path)
		}
		doc.AddOperation(op)
	}
	data, err := json.MarshalIndent(doc, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return append(data, '\n')
}

// TestOpenAPI holds the document that is served to the routes and their types.
func TestOpenAPI(t *testing.T) {
	got := document(t)
	if *update {
		if err := os.WriteFile("openapi.json", got, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(got, openAPI) {
		t.Error("openapi.json is not of these types: go test ./runtime/api/server -run OpenAPI -update")
	}
}

// TestNames holds the members of what is sent to one way to write them.
func TestNames(t *testing.T) {
	var doc struct {
		Components struct {
			Schemas map[string]struct{ Properties map[string]any }
		}
	}
	if err := json.Unmarshal(openAPI, &doc); err != nil {
		t.Fatal(err)
	}
	snake := regexp.MustCompile(`^\$?[a-z][a-z0-9]*(_[a-z0-9]+)*$`)
	for name, s := range doc.Components.Schemas {
		for p := range s.Properties {
			if !snake.MatchString(p) {
				t.Errorf("%s.%s: give the field a json tag", name, p)
			}
		}
	}
}
