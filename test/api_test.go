package test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/api"
)

// serve starts `agentbox serve` and returns it with its socket, once it answers.
// Other commands of the box use it from then on.
func (b *box) serve(env ...string) (*exec.Cmd, string) {
	b.Helper()
	socket := filepath.Join(b.root, "run", api.SocketName)
	cmd := b.command(context.Background(), append([]string{"serve"}, b.serveArgs...)...)
	cmd.Env = append(cmd.Env, env...)
	notify, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: filepath.Join(b.root, "notify"), Net: "unixgram"})
	if err != nil {
		b.Fatal(err)
	}
	defer os.Remove(notify.LocalAddr().String())
	defer notify.Close()
	cmd.Env = append(cmd.Env, "NOTIFY_SOCKET="+notify.LocalAddr().String())
	log, err := os.Create(filepath.Join(b.root, "serve.log"))
	if err != nil {
		b.Fatal(err)
	}
	defer log.Close()
	cmd.Stdout, cmd.Stderr, cmd.SysProcAttr = log, log, b.serveAttr
	if err := cmd.Start(); err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() {
		if b.Failed() {
			data, _ := os.ReadFile(log.Name())
			b.Logf("%s", data)
		}
		if cmd.ProcessState == nil {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			if err := cmd.Wait(); err != nil {
				b.Errorf("serve: %v", err)
			}
		}
	})
	buf := make([]byte, 100)
	if err := notify.SetReadDeadline(time.Now().Add(time.Minute)); err != nil {
		b.Fatal(err)
	}
	n, err := notify.Read(buf)
	if err != nil || string(buf[:n]) != "READY=1" {
		b.Fatalf("systemd is told %q: %v", buf[:n], err)
	}
	return cmd, socket
}

// The service is killed in the middle of a checkpoint. The same request with the
// same key, sent to the next service, is done once.
func TestServiceKilled(t *testing.T) {
	t.Parallel()
	for _, at := range []string{"checkpoint.after-dump", "checkpoint.after-commit"} {
		t.Run(at, func(t *testing.T) {
			b := memoryBox(t)
			cmd, socket := b.serve("AGENTBOX_FAILPOINT=" + at + "=kill")
			b.start("c", "busybox", "sleep", "1000")
			c := api.Dial(socket)
			defer c.Close()
			ctx := api.WithKey(t.Context(), "turn 1")
			_, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{Name: "one"})
			if err == nil || !strings.Contains(err.Error(), socket) {
				t.Errorf("the error of a service that is killed: %v", err)
			}
			if err := cmd.Wait(); err == nil {
				t.Fatal("the service was not killed")
			}
			_, _ = b.serve()
			var ids []string
			for range 2 {
				got, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{Name: "one"})
				if err != nil {
					t.Fatal(err)
				}
				ids = append(ids, got.ID)
			}
			list, err := c.Checkpoints(t.Context(), runtime.CheckpointFilter{})
			if err != nil || len(list) != 1 || ids[0] != ids[1] || list[0].ID != ids[0] {
				t.Errorf("%v, then %+v: %v", ids, list, err)
			}
			b.ok("restore", "c", "one")
		})
	}
}

// A panic in the middle of a verb is that verb's failure: the service lives, what the verb
// had stopped goes on, and others are served meanwhile and afterwards.
func TestServicePanics(t *testing.T) {
	t.Parallel()
	for at, verb := range map[string]func(context.Context, *api.Client) error{
		"checkpoint.after-dump": func(ctx context.Context, c *api.Client) error {
			_, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{})
			return err
		},
		"checkpoint.before-commit": func(ctx context.Context, c *api.Client) error {
			_, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{FilesOnly: true})
			return err
		},
		"restore.after-layout": func(ctx context.Context, c *api.Client) error {
			_, err := c.Restore(ctx, "c", runtime.RestoreOptions{})
			return err
		},
		"restore.after-proof": func(ctx context.Context, c *api.Client) error {
			_, err := c.Restore(ctx, "c", runtime.RestoreOptions{})
			return err
		},
	} {
		t.Run(at, func(t *testing.T) {
			b := memoryBox(t)
			b.start("c", "--network", "none", "busybox", "sleep", "1000")
			b.start("other", "--network", "none", "busybox", "sleep", "1000")
			b.ok("checkpoint", "--name", "one", "c")
			cmd, socket := b.serve("AGENTBOX_FAILPOINT=" + at + "=panic")
			c := api.Dial(socket)
			defer c.Close()
			if err := verb(t.Context(), c); err == nil || !strings.Contains(err.Error(), "panic: failpoint "+at) {
				t.Errorf("it ends with %v", err)
			}
			if _, err := c.Exec(t.Context(), "other", runtime.Process{Args: []string{"true"}},
				runtime.Streams{}); err != nil {
				t.Errorf("another sandbox: %v", err)
			}
			sb, err := c.Sandbox(t.Context(), "c")
			if err != nil || at != "restore.after-proof" && sb.Status != runtime.Running { // what was finished there panics once more
				t.Errorf("%s: %v", sb.Status, err)
			}
			stopService(t, cmd)
			_, _ = b.serve()
			if sb, err = c.Sandbox(t.Context(), "c"); err != nil {
				t.Fatal(err)
			}
			b.ok("restore", "c", "one")
			b.ok("exec", "c", "true")
			b.ok("audit", "verify")
		})
	}
}

// stopService has a service end as systemd does.
func stopService(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("the service: %v", err)
	}
}

// A supervisor that is killed is started again by a service that gets no request, and does not stay as
// its zombie.
func TestServiceRevives(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cmd, socket := b.serve()
	b.start("c", "--ttl", "4s", "--stop-signal", "KILL", "busybox", "sleep", "1000")
	c := api.Dial(socket)
	defer c.Close()
	children := func() (list [][]string) { // state, command line
		files, err := filepath.Glob("/proc/[0-9]*/stat")
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range files {
			data, _ := os.ReadFile(f) // it may have ended
			_, rest, _ := strings.Cut(string(data), ") ")
			if field := strings.Fields(rest); len(field) > 1 && field[1] == strconv.Itoa(cmd.Process.Pid) {
				args, _ := os.ReadFile(filepath.Join(filepath.Dir(f), "cmdline"))
				list = append(list, []string{
					field[0], strings.ReplaceAll(string(args), "\x00", " "), filepath.Base(filepath.Dir(f)),
				})
			}
		}
		return list
	}
	killed := false
	for deadline := time.Now().Add(30 * time.Second); !killed; time.Sleep(10 * time.Millisecond) {
		for _, child := range children() {
			if strings.HasSuffix(child[1], " supervise ") {
				pid, err := strconv.Atoi(child[2])
				if err = errors.Join(err, syscall.Kill(pid, syscall.SIGKILL)); err != nil {
					t.Fatal(err)
				}
				killed = true
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("it has no supervisor")
		}
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		sb, err := c.Sandbox(t.Context(), "c")
		if err != nil {
			t.Fatal(err)
		}
		if sb.Status == runtime.Exited {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("its time is over, and it is %s", sb.Status)
		}
	}
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		list := children()
		if !slices.ContainsFunc(list, func(child []string) bool { return child[0] == "Z" }) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the service has zombies: %q", list)
		}
	}
}

// A long checkpoint is cancelled by its caller, and leaves nothing.
func TestServiceCancel(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	cmd, socket := b.serve("AGENTBOX_FAILPOINT=checkpoint.after-freeze=stop")
	b.start("c", "busybox", "sleep", "1000")
	c := api.Dial(socket)
	defer c.Close()
	ctx, cancel := context.WithCancel(t.Context())
	failed := make(chan error, 1)
	go func() {
		_, err := c.Checkpoint(ctx, "c", runtime.CheckpointOptions{})
		failed <- err
	}()
	awaitStop(t, cmd.Process.Pid)
	cancel()
	if err := cmd.Process.Signal(syscall.SIGCONT); err != nil {
		t.Fatal(err)
	}
	if err := <-failed; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if list, err := c.Checkpoints(t.Context(), runtime.CheckpointFilter{}); err != nil || len(list) > 0 {
		t.Error(list, err)
	}
	if sb, err := c.Sandbox(t.Context(), "c"); err != nil || sb.Status != runtime.Running {
		t.Error(sb.Status, err)
	}
}

// awaitStop waits until a process has stopped itself.
func awaitStop(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		tasks, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task", "*", "stat"))
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range tasks {
			data, _ := os.ReadFile(f) // it may have ended
			if _, rest, ok := strings.Cut(string(data), ") "); ok && strings.HasPrefix(rest, "T") {
				return
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("the service does not come to the failpoint")
		}
	}
}

// The service's answers are as its own document says.
func TestServiceContract(t *testing.T) {
	t.Parallel()
	b := memoryBox(t)
	_, socket := b.serve()
	h := http.Client{Transport: &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return net.Dial("unix", socket)
	}}}
	defer h.CloseIdleConnections()
	call := func(method, path, body string) (int, string, []byte) {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), method, "http://agentbox"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := h.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		data, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, resp.Header.Get("Content-Type"), data
	}
	_, _, raw := call("GET", "/openapi.json", "")
	var doc struct {
		Paths map[string]map[string]struct {
			Responses map[string]struct {
				Content map[string]struct{ Schema json.RawMessage }
			}
		}
		Components struct{ Schemas json.RawMessage }
	}
	// The document's references, as a schema of its own has them.
	if err := json.Unmarshal(
		bytes.ReplaceAll(raw, []byte("#/components/schemas/"), []byte("#/$defs/")),
		&doc); err != nil {
		t.Fatal(err)
	}
	check := func(method, route, path, body string, want int) {
		t.Helper()
		status, media, data := call(method, path, body)
		if status != want {
			t.Fatalf("%s %s: %d, want %d: %s", method, path, status, want, data)
		}
		responses := doc.Paths[route][strings.ToLower(method)].Responses
		r, ok := responses["200"]
		if status != http.StatusOK {
			r, ok = responses["default"]
		}
		if !ok || len(r.Content[media].Schema) == 0 {
			t.Fatalf("%s %s: %d with %s is not in the document", method, route, status, media)
		}
		var schema jsonschema.Schema
		text := append([]byte(`{"$defs":`), doc.Components.Schemas...)
		text = append(append(append(text, `,"allOf":[`...), r.Content[media].Schema...), "]}"...)
		if err := json.Unmarshal(text, &schema); err != nil {
			t.Fatal(err)
		}
		resolved, err := schema.Resolve(nil)
		if err != nil {
			t.Fatal(err)
		}
		var v any
		if err := json.Unmarshal(data, &v); err != nil {
			t.Fatal(err)
		}
		if err := resolved.Validate(v); err != nil {
			t.Errorf("%s %s: %v: %s", method, path, err, data)
		}
	}
	const one = "/v1/sandboxes/{sandbox}"
	check("GET", "/v1/info", "/v1/info", "", 200)
	check("POST", "/v1/sandboxes", "/v1/sandboxes",
		`{"spec":{"name":"c","image":"busybox","args":["sleep","1000"],"network":{"mode":"none"}}}`, 200)
	check("POST", one+"/start", "/v1/sandboxes/c/start", "", 200)
	check("GET", "/v1/sandboxes", "/v1/sandboxes", "", 200)
	check("GET", one, "/v1/sandboxes/c", "", 200)
	check("GET", one, "/v1/sandboxes/nope", "", 404)
	check("POST", one+"/exec", "/v1/sandboxes/c/exec", `{"args":["touch","/new"]}`, 200)
	check("GET", one+"/stat", "/v1/sandboxes/c/stat?path=/etc/passwd", "", 200)
	check("POST", one+"/checkpoints", "/v1/sandboxes/c/checkpoints", `{"name":"one"}`, 200)
	check("POST", one+"/checkpoints", "/v1/sandboxes/c/checkpoints", `{"name":"one"}`, 409)
	check("POST", one+"/kill", "/v1/sandboxes/c/kill", `{"signal":"NOPE"}`, 400)
	check("GET", "/v1/policies", "/v1/policies", "", 200)
	check("GET", "/v1/policies/{policy}", "/v1/policies/strict", "", 200)
	check("GET", "/v1/policies/{policy}", "/v1/policies/nope", "", 404)
	check("POST", one+"/plan", "/v1/sandboxes/c/plan", `{}`, 200)
	check("POST", one+"/restore", "/v1/sandboxes/c/restore", `{}`, 200)
	check("POST", one+"/effects", "/v1/sandboxes/c/effects", `{"command":["true"],"label":"l"}`, 200)
	check("POST", one+"/effects", "/v1/sandboxes/c/effects", `{"command":["no-such-program"]}`, 400)
	check("GET", one+"/effects", "/v1/sandboxes/c/effects?all=true", "", 200)
	check("POST", one+"/plan", "/v1/sandboxes/c/plan", `{}`, 200)
	check("POST", one+"/restore", "/v1/sandboxes/c/restore", `{}`, 200)
	check("POST", one+"/effects/{effect}/remove", "/v1/sandboxes/c/effects/0123/remove", "", 404)
	check("GET", one+"/history", "/v1/sandboxes/c/history", "", 200)
	check("POST", "/v1/diff", "/v1/diff", `{"sandbox":"c","from":"image"}`, 200)
	check("GET", "/v1/checkpoints", "/v1/checkpoints?all=true", "", 200)
	check("GET", "/v1/checkpoints/{checkpoint}", "/v1/checkpoints/"+url.PathEscape("c@one"), "", 200)
	check("POST", "/v1/checkpoints/{checkpoint}/tag", "/v1/checkpoints/c@one/tag", `{"tag":"two"}`, 200)
	check("GET", "/v1/usage", "/v1/usage", "", 200)
	check("POST", "/v1/verify", "/v1/verify", `{}`, 200)
	check("POST", "/v1/prune", "/v1/prune", `{"dry_run":true,"keep_last":1}`, 200)
	check("POST", "/v1/recover", "/v1/recover", `{}`, 200)
	check("GET", "/v1/images", "/v1/images", "", 200)
	check("GET", "/v1/images/{image}", "/v1/images/busybox", "", 200)
	check("POST", one+"/stop", "/v1/sandboxes/c/stop", `{"timeout_ns":0}`, 200)
	check("GET", one+"/wait", "/v1/sandboxes/c/wait", "", 200)
	check("POST", one+"/remove", "/v1/sandboxes/c/remove", `{"checkpoints":true}`, 200)
}
