package criu

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"

	"github.com/agentbox/agentbox/criu/criutest"
	"github.com/agentbox/agentbox/criu/host"
)

func TestCheck(t *testing.T) {
	criutest.Root(t)
	start := time.Now()
	f, err := Check(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%+v in %v", f, time.Since(start))
	if !f.Works || f.Version < 30000 || f.VersionString() == "" || f.Problem != "" {
		t.Errorf("%+v", f)
	}
	if f.InetSockets == (f.Version < 40200 && kernelAtLeast(f.KernelString, 6, 16)) {
		t.Errorf("inet sockets %v with CRIU %d on Linux %s", f.InetSockets, f.Version, f.KernelString)
	}
}

func TestCheckBroken(t *testing.T) {
	criutest.Root(t)
	dir := t.TempDir()
	script := "#!/bin/sh\n[ \"$1\" = check ] && echo 'Error (criu/vdso.c:1): Unexpected rt vDSO area bounds' && exit 1\nexit 1\n"
	if err := os.WriteFile(filepath.Join(dir, "criu"), []byte(script), 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":"+os.Getenv("PATH")+":/usr/local/sbin")
	f, err := Check(context.Background())
	if err != nil || f.Works || f.Problem == "" {
		t.Fatalf("%+v, %v", f, err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := Check(ctx); !errors.Is(err, context.Canceled) {
		t.Fatalf("cancelled: %v", err)
	}
}

func TestKernelAtLeast(t *testing.T) {
	for release, want := range map[string]bool{
		"6.16.0": true, "6.15.9-x": false, "7.0": true, "5.99": false, "x": false, "6.18.44-a": true,
	} {
		if got := kernelAtLeast(release, 6, 16); got != want {
			t.Errorf("%s: %v", release, got)
		}
	}
}

// CRIU answers though threads of this process end all the time, as those do that were in
// another namespace.
func TestAnswersWhileThreadsEnd(t *testing.T) {
	path, err := host.Find("criu", nil)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	for range 200 {
		wg.Go(func() {
			for ctx.Err() == nil {
				done := make(chan struct{})
				go func() {
					defer close(done)
					runtime.LockOSThread() // without Unlock: the thread ends with the goroutine
				}()
				<-done
			}
		})
	}
	for range 20 {
		resp, err := swrk(ctx, path, &rpc.CriuReq{Type: rpc.CriuReqType_VERSION.Enum()})
		if err != nil || resp.GetVersion().GetMajorNumber() < 3 {
			t.Errorf("%v, %v", resp.GetVersion(), err)
			break
		}
	}
	cancel()
	wg.Wait()
}
