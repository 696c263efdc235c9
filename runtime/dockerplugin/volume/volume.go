// Package volume answers dockerd's calls to a volume plugin, version 1 of the
// protocol: a POST to /VolumeDriver.NAME with JSON in and JSON out, whose member
// Err, when it is not empty, is what dockerd shows its user. What the calls do is
// up to package runtime/volume; nothing is kept here.
package volume

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/runtime/volume"
)

// maxBody bounds a request. Its names are at most 128 bytes, its options a few.
const maxBody = 1 << 20

// callTimeout bounds one call. dockerd waits for two minutes, and holds the
// lock of the volume meanwhile.
const callTimeout = 100 * time.Second

const contentType = "application/vnd.docker.plugins.v1.2+json"

// Store is what the calls act on: *volume.Volumes.
type Store interface {
	Create(ctx context.Context, name string, opts volume.CreateOptions) error
	Remove(ctx context.Context, name string) error
	Mount(ctx context.Context, name, id string) (path string, err error)
	Unmount(ctx context.Context, name, id string) error
	Inspect(ctx context.Context, name string) (volume.Volume, error)
	List(ctx context.Context) ([]volume.Volume, error)
}

// request has the members of all calls.
type request struct {
	Name string
	ID   string
	Opts map[string]string
}

// response has the members of all answers.
type response struct {
	Mountpoint   string `json:",omitempty"`
	Volume       *item  `json:",omitempty"`
	Volumes      []item `json:",omitempty"`
	Capabilities *scope `json:",omitempty"`
	Err          string
}

type scope struct{ Scope string }

// item is a volume as dockerd lists it.
type item struct {
	Name       string
	Mountpoint string         `json:",omitempty"`
	CreatedAt  string         `json:",omitempty"`
	Status     map[string]any `json:",omitempty"`
}

// Handler answers /VolumeDriver.*.
func Handler(store Store, log *slog.Logger) http.Handler {
	if log == nil {
		log = slog.Default()
	}
	calls := map[string]func(context.Context, Store, request) (response, error){
		"Create": create, "Remove": remove, "Mount": mount, "Unmount": unmount,
		"Path": path, "Get": get, "List": list, "Capabilities": capabilities,
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		name := strings.TrimPrefix(r.URL.Path, "/VolumeDriver.")
		call, ok := calls[name]
		if !ok {
			http.NotFound(w, r)
			return
		}
		// A caller that goes away does not undo what it asked for: dockerd asks again, or
		// takes it back.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(r.Context()), callTimeout)
		defer cancel()
		req, err := decode(http.MaxBytesReader(w, r.Body, maxBody))
		var out response
		if err == nil {
			out, err = call(ctx, store, req)
		}
		w.Header().Set("Content-Type", contentType)
		if err != nil {
			log.Warn("volume call failed", "call", name, "volume", req.Name, "err", err)
			out = response{Err: message(err)}
		}
		_ = json.NewEncoder(w).Encode(out)
	})
}

// decode reads a request; List and Capabilities come with none.
func decode(body io.Reader) (req request, err error) {
	dec := json.NewDecoder(body)
	if err := dec.Decode(&req); err != nil && !errors.Is(err, io.EOF) {
		return request{}, fmt.Errorf("%w: request: %w", fault.ErrInvalid, err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return request{}, fmt.Errorf("%w: more than one request in a body", fault.ErrInvalid)
	}
	return req, nil
}

// message is an error with its hints, in one line.
func message(err error) string {
	return strings.Join(append([]string{err.Error()}, fault.Hint(err)...), ". ")
}

func create(ctx context.Context, s Store, req request) (response, error) {
	var opts volume.CreateOptions
	for key, value := range req.Opts {
		switch key {
		case "from":
			opts.From = value
		case "ro", "readonly":
			opts.ReadOnly = true
			if value != "" {
				var err error
				if opts.ReadOnly, err = strconv.ParseBool(value); err != nil {
					return response{}, fmt.Errorf("%w: option %s=%q is neither true nor false",
						fault.ErrInvalid, key, value)
				}
			}
		default:
			return response{}, &fault.Error{
				Err: fmt.Errorf("%w: option %q is unknown", fault.ErrInvalid, key), Hint: "There are from=DIR and ro.",
			}
		}
	}
	return response{}, s.Create(ctx, req.Name, opts)
}

func remove(ctx context.Context, s Store, req request) (response, error) {
	if err := volume.ValidName(req.Name); err != nil {
		return response{}, err
	}
	return response{}, s.Remove(ctx, req.Name)
}

func mount(ctx context.Context, s Store, req request) (response, error) {
	p, err := s.Mount(ctx, req.Name, req.ID)
	return response{Mountpoint: p}, err
}

func unmount(ctx context.Context, s Store, req request) (response, error) {
	if err := volume.ValidName(req.Name); err != nil {
		return response{}, err
	}
	return response{}, s.Unmount(ctx, req.Name, req.ID)
}

func path(ctx context.Context, s Store, req request) (response, error) {
	v, err := inspect(ctx, s, req)
	return response{Mountpoint: v.Mountpoint}, err
}

func get(ctx context.Context, s Store, req request) (response, error) {
	v, err := inspect(ctx, s, req)
	if err != nil {
		return response{}, err
	}
	one := view(v)
	return response{Volume: &one}, nil
}

// inspect finds a volume by its name alone: dockerd knows no ids.
func inspect(ctx context.Context, s Store, req request) (volume.Volume, error) {
	if err := volume.ValidName(req.Name); err != nil {
		return volume.Volume{}, err
	}
	v, err := s.Inspect(ctx, req.Name)
	if err == nil && v.Name != req.Name {
		return volume.Volume{}, fmt.Errorf("volume %s: %w", req.Name, fault.ErrNotFound)
	}
	return v, err
}

func list(ctx context.Context, s Store, _ request) (response, error) {
	all, err := s.List(ctx)
	out := response{Volumes: []item{}}
	for _, v := range all {
		out.Volumes = append(out.Volumes, view(v))
	}
	return out, err
}

func capabilities(context.Context, Store, request) (response, error) {
	return response{Capabilities: &scope{"local"}}, nil
}

func view(v volume.Volume) item {
	return item{Name: v.Name, Mountpoint: v.Mountpoint, CreatedAt: v.Created.UTC().Format(time.RFC3339),
		Status: map[string]any{
			"from": v.From, "read_only": v.ReadOnly, "upperdir": v.Upperdir, "mounts": v.Mounts,
		}}
}
