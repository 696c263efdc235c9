package oci

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/agentbox/agentbox/runtime"
	"github.com/agentbox/agentbox/runtime/internal/streams"
)

func TestLogsOfRuns(t *testing.T) {
	x := newBox(t)
	id := x.create(sh("echo one; echo two >&2; printf thr; printf ee"))
	for range 2 {
		x.start(id)
		_, err := x.Wait(t.Context(), id)
		must(t, err)
	}
	out, errs := x.logs(id, runtime.LogOptions{Tail: -1})
	if out != "one\nthreeone\nthree" && out != "one\nthreeone\nthree\n" || errs != "two\ntwo\n" {
		t.Errorf("%q, %q", out, errs)
	}
	out, errs = x.logs(id, runtime.LogOptions{Tail: 0})
	if out != "" || errs != "" {
		t.Errorf("none: %q, %q", out, errs)
	}
}

// writeLog puts a log into a container that never ran.
func (x *fixture) writeLog(text string) string {
	x.t.Helper()
	id := x.create(spec("true"))
	write(x.t, x.box.Dir(id, "log"), text, 0o600)
	return id
}

func at(second int) string {
	return time.Date(2030, 1, 2, 3, 4, second, 5, time.UTC).Format(time.RFC3339Nano)
}

func TestLogFormat(t *testing.T) {
	x := newBox(t)
	long := strings.Repeat("x", 8000)
	id := x.writeLog(
		at(1) + " stdout F first\n" +
			at(2) + " stderr P half \n" +
			at(2) + " stderr F whole\n" +
			"damaged\n" +
			at(3) + " stdout F \n" +
			at(4) + " stdout P " + long + "\n" +
			at(4) + " stdout P " + long + "\n" +
			at(4) + " stdout F end\n" +
			at(5) + " stdout P open\n" +
			at(6) + " stdout P  end\n" +
			at(7) + " stdout F not whole y")
	for _, test := range []struct {
		opts        runtime.LogOptions
		out, errout string
	}{
		{runtime.LogOptions{Tail: -1}, "first\n\n" + long + long + "end\nopen end", "half whole\n"},
		{runtime.LogOptions{Tail: 100}, "first\n\n" + long + long + "end\nopen end", "half whole\n"},
		{runtime.LogOptions{Tail: 2}, long + long + "end\nopen end", ""},
		{runtime.LogOptions{Tail: 4}, "\n" + long + long + "end\nopen end", "half whole\n"},
		{runtime.LogOptions{Tail: -1, Since: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)}, "open end", ""},
		{
			runtime.LogOptions{Tail: -1, Timestamps: true, Since: time.Date(2030, 1, 2, 3, 4, 5, 0, time.UTC)},
			at(5) + " open end", "",
		},
	} {
		// The half-written last record: never printed.
		out, errs := x.logs(id, test.opts)
		if out != test.out || errs != test.errout {
			t.Errorf("%+v: %d bytes %.40q, %q", test.opts, len(out), out, errs)
		}
	}
}

func TestTail(t *testing.T) {
	x := newBox(t)
	var text, want strings.Builder
	for i := range 30000 {
		fmt.Fprintf(&text, "%s stdout F line %d %s\n", at(i%60), i, strings.Repeat("y", i%97))
		if i >= 30000-5000 {
			fmt.Fprintf(&want, "line %d %s\n", i, strings.Repeat("y", i%97))
		}
	}
	id := x.writeLog(text.String())
	if out, _ := x.logs(id, runtime.LogOptions{Tail: 5000}); out != want.String() {
		t.Errorf("%d bytes instead of %d", len(out), want.Len())
	}
	if out, _ := x.logs(id, runtime.LogOptions{Tail: 1}); !strings.HasPrefix(out, "line 29999 ") ||
		strings.Count(out, "\n") != 1 {
		t.Errorf("%q", out)
	}
}

func TestFollow(t *testing.T) {
	x := newBox(t)
	id := x.up(sh("echo begin; while ! test -e /go; do sleep 0.02; done; seq 1 5000; echo last"))
	var out buffer
	done := make(chan error, 1)
	go func() {
		done <- x.Logs(t.Context(), id, runtime.LogOptions{Follow: true, Tail: -1}, &out, nil)
	}()
	eventually(t, "the first line", out.has("begin\n"))
	x.exec(id, "touch", "/go")
	must(t, <-done)
	if out.String() != "begin\n"+numbers(5000)+"last\n" {
		t.Errorf("%d bytes", len(out.String()))
	}

	id = x.up(sh("while :; do echo tick; sleep 0.01; done"))
	ctx, cancel := context.WithCancel(t.Context())
	go func() { done <- x.Logs(ctx, id, runtime.LogOptions{Follow: true}, &out, nil) }()
	eventually(t, "ticks", out.has("tick\n"))
	cancel()
	if err := <-done; err != context.Canceled {
		t.Errorf("%v", err)
	}
	// Conmon starts the file anew when it is full; a follower goes on in the
	// new one, after the rest of the old one.
	var both buffer
	go func() {
		done <- x.Logs(t.Context(), id, runtime.LogOptions{Follow: true, Tail: -1}, &both, nil)
	}()
	eventually(t, "ticks", both.has("tick\n"))
	must(t, os.Rename(x.box.Dir(id, "log"), x.box.Dir(id, "log.old")))
	f, err := os.OpenFile(x.box.Dir(id, "log.old"), os.O_APPEND|os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString(at(1) + " stdout F end of the old\n")
	must(t, err)
	must(t, f.Close())
	write(t, x.box.Dir(id, "log"), at(1)+" stdout F begin of the new\n", 0o600)
	eventually(t, "the new file", both.has("begin of the new\n"))
	must(t, x.Stop(t.Context(), id, runtime.StopOptions{}))
	must(t, <-done)
	if !both.has("end of the old\n")() {
		t.Error("the rest of the old file is missing")
	}
}

func TestTrimLog(t *testing.T) {
	x := newBox(t)
	line := at(1) + " stdout F " + strings.Repeat("z", 900) + "\n"
	id := x.writeLog(strings.Repeat(line, (streams.Kept+1<<20)/len(line)))
	x.start(id)
	_, err := x.Wait(t.Context(), id)
	must(t, err)
	st, err := os.Stat(x.box.Dir(id, "log"))
	must(t, err)
	if st.Size() > streams.Kept || st.Size() < streams.Kept-int64(len(line)) || st.Size()%int64(len(line)) != 0 {
		t.Errorf("%d bytes kept", st.Size())
	}
}
