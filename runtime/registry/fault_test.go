package registry

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/remote"
	"github.com/agentbox/agentbox/internal/remote/remotetest"
)

// onePack pushes a checkpoint of a single pack.
func onePack(t *testing.T, s *served, o Options) (*memory, v1.Descriptor, []byte) {
	t.Helper()
	src := sample(7, 100, 20_000)
	mustPush(t, s.Host()+"/web:one", src, about(id1), o)
	d := s.artifact(t, "web", "one").packs[0].pack
	data := s.blob(t, "web", d.Digest.String())
	s.Forget()
	return src, d, data
}

func isGet(r *http.Request, d v1.Descriptor) bool {
	return r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, d.Digest.String())
}

// A connection that breaks costs what was not yet there, no more.
func TestPullCut(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, data := onePack(t, s, o)
	fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !isGet(r, d) {
			return false
		}
		remotetest.Cut(w, r, data, len(data)/4+1)
		return true
	})
	dst := newMemory()
	got := pullInto(t, s.Host()+"/web:one", dst, o)
	src.same(t, dst)
	gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String())
	if fired() != 4 || len(gets) != 4 {
		t.Errorf("%d, %q", fired(), gets)
	}
	for i, g := range gets[1:] {
		if !strings.Contains(g, " bytes=") {
			t.Errorf("request %d does not continue: %s", i+1, g)
		}
	}
	if got.Bytes > d.Size+10_000 {
		t.Errorf("%d bytes travelled for a pack of %d", got.Bytes, d.Size)
	}
}

// The next pull goes on where a killed one stopped.
func TestPullResumes(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, data := onePack(t, s, o)
	ctx, cancel := context.WithCancel(t.Context())
	o.Progress = func(done, _ int64) {
		if done > d.Size/2 {
			cancel()
		}
	}
	s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !isGet(r, d) {
			return false
		}
		remotetest.Cut(w, r, data, len(data)/2+1000)
		return true
	})
	if _, err := Pull(ctx, s.Host()+"/web:one", newMemory().begin, o); !errors.Is(err, context.Canceled) {
		t.Fatalf("%v", err)
	}
	left, err := os.ReadFile(filepath.Join(o.Scratch, d.Digest.Hex+".part"))
	if err != nil || len(left) < len(data)/2 || !bytes.Equal(left, data[:len(left)]) {
		t.Fatalf("%d of %d bytes are left: %v", len(left), len(data), err)
	}
	s.Breaks(nil)
	s.Forget()
	o.Progress = nil
	dst := newMemory()
	pullInto(t, s.Host()+"/web:one", dst, o)
	src.same(t, dst)
	want := fmt.Sprintf("GET /v2/web/blobs/%s bytes=%d-%d", d.Digest, len(left), len(data)-1)
	if gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String()); len(gets) != 1 || gets[0] != want {
		t.Errorf("%q, want %q", gets, want)
	}
}

// Files in the scratch directory are not trusted.
func TestPullBadLeftover(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, data := onePack(t, s, o)
	flipped := bytes.Clone(data)
	flipped[len(flipped)/3] ^= 1
	for name, left := range map[string][]byte{
		"other bytes": flipped[:len(flipped)/2], "whole but wrong": flipped,
		"too long": append(bytes.Clone(data), "more"...), "whole": data, "empty": {},
	} {
		t.Run(name, func(t *testing.T) {
			if err := os.WriteFile(filepath.Join(o.Scratch, d.Digest.Hex+".part"), left, 0o600); err != nil {
				t.Fatal(err)
			}
			s.Forget()
			dst := newMemory()
			pullInto(t, s.Host()+"/web:one", dst, o)
			src.same(t, dst)
			if gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String()); (len(gets) == 0) != (name == "whole") {
				t.Errorf("%q", gets)
			}
		})
	}
	// A symlink in its place is not followed.
	victim := filepath.Join(t.TempDir(), "victim")
	if err := os.WriteFile(victim, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(o.Scratch, d.Digest.Hex+".part")); err != nil {
		t.Fatal(err)
	}
	if _, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o); err == nil {
		t.Error("a symlink was followed")
	}
	if b, _ := os.ReadFile(victim); string(b) != "precious" {
		t.Errorf("%q", b)
	}
}

// Two pulls of the same at once do not write into one file.
func TestPullBusy(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, data := onePack(t, s, o)
	entered, leave := make(chan struct{}), make(chan struct{})
	var once sync.Once
	s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if isGet(r, d) {
			once.Do(func() { close(entered) })
			<-leave
			remotetest.Cut(w, r, data, len(data))
			return true
		}
		return false
	})
	done := make(chan error, 1)
	dst := newMemory()
	go func() { _, err := Pull(context.Background(), s.Host()+"/web:one", dst.begin, o); done <- err }()
	<-entered
	_, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o)
	close(leave)
	if !errors.Is(err, fault.ErrBusy) {
		t.Errorf("%v", err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	src.same(t, dst)
}

// Registries that know no ranges, or answer strangely.
func TestPullRanges(t *testing.T) {
	for name, c := range map[string]struct {
		answer func(w http.ResponseWriter, r *http.Request, data []byte)
		want   error
	}{
		"ignores ranges": {func(w http.ResponseWriter, _ *http.Request, data []byte) { _, _ = w.Write(data) }, nil},
		"refuses ranges": {func(w http.ResponseWriter, r *http.Request, data []byte) {
			if r.Header.Get("Range") != "" {
				w.WriteHeader(http.StatusRequestedRangeNotSatisfiable)
				return
			}
			_, _ = w.Write(data)
		}, nil},
		"another range": {func(w http.ResponseWriter, r *http.Request, data []byte) {
			w.Header().Set("Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(data)-1, len(data)))
			w.WriteHeader(http.StatusPartialContent)
			_, _ = w.Write(data)
		}, fault.ErrCorrupt},
		"too much": {func(w http.ResponseWriter, r *http.Request, data []byte) {
			w.Header().Set("Content-Length", strconv.Itoa(len(data)+1))
			_, _ = w.Write(append(bytes.Clone(data), 0))
		}, fault.ErrCorrupt},
		"wrong bytes": {func(w http.ResponseWriter, _ *http.Request, data []byte) {
			bad := bytes.Clone(data)
			bad[len(bad)/2] ^= 0x10
			_, _ = w.Write(bad)
		}, fault.ErrCorrupt},
		"no bytes": {func(w http.ResponseWriter, _ *http.Request, _ []byte) {
			w.WriteHeader(http.StatusOK)
		}, fault.ErrCorrupt},
	} {
		t.Run(name, func(t *testing.T) {
			s, o := serve(t), fast(t)
			src, d, data := onePack(t, s, o)
			if err := os.WriteFile(filepath.Join(o.Scratch, d.Digest.Hex+".part"), data[:100], 0o600); err != nil {
				t.Fatal(err)
			}
			fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
				if !isGet(r, d) {
					return false
				}
				w.Header().Set("Content-Type", "application/octet-stream")
				c.answer(w, r, data)
				return true
			})
			dst := newMemory()
			_, err := Pull(t.Context(), s.Host()+"/web:one", dst.begin, o)
			if fired() == 0 {
				t.Fatal("the fault did not fire")
			}
			if !errors.Is(err, c.want) {
				t.Fatalf("%v, want %v", err, c.want)
			}
			if c.want == nil {
				src.same(t, dst)
			} else if len(dst.chunks) > 0 {
				t.Errorf("%d chunks of a bad pack were put", len(dst.chunks))
			}
		})
	}
}

// Bodies that end early without a word (chunked), and bodies that stand still.
func TestPullStalls(t *testing.T) {
	for name, stand := range map[string]bool{"ends early": false, "stands still": true} {
		t.Run(name, func(t *testing.T) {
			s, o := serve(t), fast(t)
			o.idle = 30 * time.Millisecond
			src, d, data := onePack(t, s, o)
			first := true
			fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
				if !isGet(r, d) || !first {
					return false
				}
				first = false
				_, _ = w.Write(data[:len(data)/2])
				w.(http.Flusher).Flush()
				if stand {
					<-r.Context().Done()
				}
				return true
			})
			dst := newMemory()
			pullInto(t, s.Host()+"/web:one", dst, o)
			src.same(t, dst)
			if fired() != 1 {
				t.Error("the fault did not fire")
			}
		})
	}
}

// Every request is tried again after an answer that says "later".
func TestRetries(t *testing.T) {
	for _, status := range []int{429, 500, 502, 503, 504} {
		s, o := serve(t), fast(t)
		failed := map[string]int{}
		var mu sync.Mutex
		fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
			mu.Lock()
			defer mu.Unlock()
			key := r.Method + r.URL.Path
			if r.Method == http.MethodPatch || strings.Contains(r.URL.Path, "uploads") {
				key = r.Method // each upload has its own address
			}
			if failed[key]++; failed[key] > 1 {
				return false
			}
			_, _ = io.Copy(io.Discard, r.Body)
			w.WriteHeader(status)
			return true
		})
		src := sample(3, 10, 1000)
		mustPush(t, s.Host()+"/web:one", src, about(id1), o)
		dst := newMemory()
		pullInto(t, s.Host()+"/web:one", dst, o)
		src.same(t, dst)
		if fired() < 10 {
			t.Errorf("%d: the fault fired %d times", status, fired())
		}
	}
}

func TestGivesUp(t *testing.T) {
	for status, want := range map[int]error{
		429: fault.ErrBusy, 500: fault.ErrBusy, 401: fault.ErrDenied, 403: fault.ErrDenied,
		404: fault.ErrNotFound, 418: nil,
	} {
		s, o := serve(t), fast(t)
		src, d, _ := onePack(t, s, o)
		fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
			if !isGet(r, d) && r.Method != http.MethodPut {
				return false
			}
			w.WriteHeader(status)
			_, _ = io.WriteString(w, `{"errors":[{"code":"NO","message":"evil\u001b[2J"}]}`)
			return true
		})
		_, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o)
		if err == nil || want != nil && !errors.Is(err, want) || strings.ContainsRune(err.Error(), 0x1b) ||
			!strings.Contains(err.Error(), strconv.Itoa(status)) {
			t.Errorf("pull, %d: %v", status, err)
		}
		wantTries := 1
		if status == 429 || status == 500 {
			wantTries = remote.Tries
		}
		if fired() != wantTries {
			t.Errorf("pull, %d: %d tries", status, fired())
		}
		src.add([]byte("new"))
		_, err = Push(t.Context(), s.Host()+"/web:two", src, about(id2), o)
		if err == nil || want != nil && !errors.Is(err, want) {
			t.Errorf("push, %d: %v", status, err)
		}
		s.Breaks(nil)
		if _, err := Pull(t.Context(), s.Host()+"/web:two", newMemory().begin, o); !errors.Is(err, fault.ErrNotFound) {
			t.Errorf("a failed push shows: %v", err)
		}
	}
}

// An upload that breaks is repeated; a push that broke off is continued by the
// next one.
func TestPushCut(t *testing.T) {
	s, o := serve(t), fast(t)
	o.packSize = 100_000 // several packs
	src := sample(5, 60, 20_000)
	patches := 0
	fired := s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method != http.MethodPatch {
			return false
		}
		if patches++; patches == 1 {
			_, _ = io.CopyN(io.Discard, r.Body, 1000)
			conn, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			conn.Close()
			return true
		}
		if patches > 6 { // three packs and their indexes are there by now, at most
			w.WriteHeader(http.StatusForbidden)
			return true
		}
		return false
	})
	if _, err := Push(t.Context(), s.Host()+"/web:one", src, about(id1), o); !errors.Is(err, fault.ErrDenied) {
		t.Fatal(err)
	}
	if fired() < 2 {
		t.Fatal("the faults did not fire")
	}
	empty(t, o.Scratch)
	s.Breaks(nil)
	s.Forget()
	p := mustPush(t, s.Host()+"/web:one", src, about(id1), o)
	if p.Skipped < 200_000 || p.Bytes == 0 {
		t.Errorf("%+v", p)
	}
	if up, all := len(s.Requests("PATCH")), 2+2*len(s.artifact(t, "web", "one").packs); up == 0 || up > all-4 {
		t.Errorf("%d uploads of %d", up, all)
	}
	dst := newMemory()
	o.packSize = 0
	pullInto(t, s.Host()+"/web:one", dst, o)
	src.same(t, dst)
}

func TestBeginRefuses(t *testing.T) {
	s, o := serve(t), fast(t)
	_, d, _ := onePack(t, s, o)
	cause := fmt.Errorf("there already: %w", fault.ErrExists)
	_, err := Pull(t.Context(), s.Host()+"/web:one", func(context.Context, []byte) (Target, error) {
		return nil, cause
	}, o)
	if !errors.Is(err, cause) {
		t.Errorf("%v", err)
	}
	if gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String()); len(gets) > 0 {
		t.Errorf("%q", gets)
	}
	empty(t, o.Scratch)
}

// Without a scratch directory nothing is left.
func TestTemporaryScratch(t *testing.T) {
	s, o := serve(t), fast(t)
	src, _, _ := onePack(t, s, o)
	t.Setenv("TMPDIR", t.TempDir())
	o.Scratch = ""
	dst := newMemory()
	if _, err := Pull(t.Context(), s.Host()+"/web:one", dst.begin, o); err != nil {
		t.Fatal(err)
	}
	src.same(t, dst)
	mustPush(t, s.Host()+"/web:two", sample(9, 3, 100), about(id2), o)
	empty(t, os.TempDir())
}

// A full disk ends the pull and is not kept full.
func TestPullNoSpace(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, _ := onePack(t, s, o)
	if err := unix.Mount("tmpfs", o.Scratch, "tmpfs", 0, fmt.Sprintf("size=%d,mode=700", d.Size/2)); err != nil {
		t.Fatalf("this test needs root: %v", err)
	}
	_, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o)
	left, readErr := os.ReadDir(o.Scratch)
	if err := unix.Unmount(o.Scratch, 0); err != nil {
		t.Fatal(err)
	}
	if !errors.Is(err, unix.ENOSPC) || readErr != nil || len(left) > 0 {
		t.Errorf("%v; left are %v, %v", err, left, readErr)
	}
	if gets := s.Requests("GET /v2/web/blobs/" + d.Digest.String()); len(gets) != 1 {
		t.Errorf("%q", gets)
	}
	dst := newMemory()
	pullInto(t, s.Host()+"/web:one", dst, o)
	src.same(t, dst)
}

// A registry cannot send us to services inside our network.
func TestRedirects(t *testing.T) {
	s, o := serve(t), fast(t)
	src, d, data := onePack(t, s, o)
	elsewhere := serve(t)
	elsewhere.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		remotetest.Cut(w, r, data, len(data))
		return true
	})
	target := ""
	s.Breaks(func(w http.ResponseWriter, r *http.Request) bool {
		if !isGet(r, d) {
			return false
		}
		http.Redirect(w, r, target, http.StatusTemporaryRedirect)
		return true
	})
	for _, target = range []string{
		"http://169.254.169.254/latest/meta-data", "https://[fe80::1]/", "https://0.0.0.0/", "http://192.0.2.7/plain",
	} {
		if _, err := Pull(t.Context(), s.Host()+"/web:one", newMemory().begin, o); !errors.Is(err, fault.ErrDenied) {
			t.Errorf("%s: %v", target, err)
		}
	}
	// The same host may keep its blobs behind another port, and have another name.
	for _, target = range []string{
		elsewhere.URL + "/blob", strings.Replace(elsewhere.URL, "127.0.0.1", "localhost", 1) + "/blob",
	} {
		dst := newMemory()
		pullInto(t, s.Host()+"/web:one", dst, o)
		src.same(t, dst)
	}
}
