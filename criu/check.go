package criu

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	goruntime "runtime"
	"strings"
	"syscall"
	"time"

	"github.com/checkpoint-restore/go-criu/v7/rpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"github.com/agentbox/agentbox/criu/host"
	"github.com/agentbox/agentbox/internal/fault"
	"github.com/agentbox/agentbox/internal/guard"
)

// Features is what CRIU can do on this host.
type Features struct {
	Path         string `json:"path"`
	Version      int    `json:"version"`         // 40201 is 4.2.1
	Works        bool   `json:"works"`           // `criu check` passes
	Problem      string `json:"problem"`         // what `criu check` says when it does not
	DirtyTrack   bool   `json:"mem_dirty_track"` // pre-dump and incremental dumps
	LazyPages    bool   `json:"lazy_pages"`      // restore first, memory later
	PidfdStore   bool   `json:"pidfd_store"`
	Nftables     bool   `json:"nftables"`     // linked with libnftables
	InetSockets  bool   `json:"inet_sockets"` // can dump TCP and UDP sockets on this kernel
	SysResource  bool   `json:"sys_resource"` // this process has CAP_SYS_RESOURCE
	KernelString string `json:"kernel"`
}

// VersionString is Version as CRIU writes it.
func (f Features) VersionString() string {
	s := fmt.Sprintf("%d.%d", f.Version/10000, f.Version/100%100)
	if sub := f.Version % 100; sub != 0 {
		s += fmt.Sprintf(".%d", sub)
	}
	return s
}

// Check asks CRIU. No CRIU is ErrNotFound; one that does not work here is no
// error, but Works is false. It takes about 0.1 s.
func Check(ctx context.Context) (Features, error) {
	var f Features
	path, err := host.Find("criu", nil)
	if err != nil {
		return f, err
	}
	f.Path = path
	var uts unix.Utsname
	if err := unix.Uname(&uts); err != nil {
		return f, err
	}
	f.KernelString = unix.ByteSliceToString(uts.Release[:])
	f.SysResource = hasCapability(unix.CAP_SYS_RESOURCE)
	f.Nftables = hasNftables(path)

	var wg guard.WaitGroup
	var versionErr error
	wg.Go(func() {
		var resp *rpc.CriuResp
		if resp, versionErr = swrk(ctx, path, &rpc.CriuReq{Type: rpc.CriuReqType_VERSION.Enum()}); versionErr == nil {
			v := resp.GetVersion()
			f.Version = int(v.GetMajorNumber()*10000 + v.GetMinorNumber()*100 + v.GetSublevel())
		}
	})
	wg.Go(func() {
		yes := proto.Bool(true)
		// go-criu's own FeatureCheck returns the question for the answer.
		resp, err := swrk(ctx, path, &rpc.CriuReq{
			Type:     rpc.CriuReqType_FEATURE_CHECK.Enum(),
			Features: &rpc.CriuFeatures{MemTrack: yes, LazyPages: yes, PidfdStore: yes},
		})
		if err == nil { // an old CRIU knows no such question
			f.DirtyTrack = resp.GetFeatures().GetMemTrack()
			f.LazyPages = resp.GetFeatures().GetLazyPages()
			f.PidfdStore = resp.GetFeatures().GetPidfdStore()
		}
	})
	wg.Go(func() {
		cmd := exec.CommandContext(ctx, path, "check")
		cmd.WaitDelay = time.Second
		cmd.Env = host.Environ()
		out, err := cmd.CombinedOutput()
		f.Works = err == nil
		if err != nil {
			f.Problem = checkProblem(string(out), err)
		}
	})
	wg.Wait()
	if err := ctx.Err(); err != nil {
		_, oerr := host.EndOrphans()
		return f, errors.Join(fmt.Errorf("criu check: %w", err), oerr)
	}
	if versionErr != nil && f.Works {
		return f, fmt.Errorf("criu version: %w", versionErr)
	}
	f.InetSockets = f.Version >= 40200 || !kernelAtLeast(f.KernelString, 6, 16)
	return f, nil
}

// checkProblem takes the first error out of what `criu check` prints.
func checkProblem(out string, err error) string {
	if d := Diagnose(strings.NewReader(out)); d.Reason != "" {
		return d.Reason
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	if last := strings.TrimSpace(lines[len(lines)-1]); last != "" {
		return last
	}
	return err.Error()
}

func kernelAtLeast(release string, major, minor int) bool {
	var a, b int
	if n, _ := fmt.Sscanf(release, "%d.%d", &a, &b); n != 2 {
		return false
	}
	return a > major || a == major && b >= minor
}

func hasCapability(n int) bool {
	head := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&head, &data[0]); err != nil {
		return false
	}
	return data[n/32].Effective&(1<<(n%32)) != 0
}

// swrk asks one question of a CRIU started for it. The package go-criu has the
// same, but with a fixed 8 KiB for the answer, no context, and a socket that
// leaks into every child forked meanwhile.
func swrk(ctx context.Context, path string, req *rpc.CriuReq) (*rpc.CriuResp, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(fds[0]), "criu"), os.NewFile(uintptr(fds[1]), "criu")
	defer ours.Close()
	cmd := exec.CommandContext(ctx, path, "swrk", "3")
	cmd.Env = host.Environ()
	cmd.ExtraFiles = []*os.File{theirs}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} // it only answers questions
	// The signal comes at the end of the thread that starts it, not of this process. Another
	// goroutine's thread may be a spent one, which ends with that.
	goruntime.LockOSThread()
	defer goruntime.UnlockOSThread()
	err = cmd.Start()
	theirs.Close()
	if err != nil {
		return nil, err
	}
	resp, err := ask(ours, req)
	ours.Close() // swrk exits when its socket is closed
	if werr := cmd.Wait(); err == nil && resp == nil {
		err = werr
	}
	return resp, err
}

func ask(sock *os.File, req *rpc.CriuReq) (*rpc.CriuResp, error) {
	data, err := proto.Marshal(req)
	if err != nil {
		return nil, err
	}
	if _, err := sock.Write(data); err != nil {
		return nil, err
	}
	buf := make([]byte, 64<<10)
	n, err := sock.Read(buf)
	if err != nil {
		return nil, err
	}
	var resp rpc.CriuResp
	if err := proto.Unmarshal(buf[:n], &resp); err != nil {
		return nil, err
	}
	if !resp.GetSuccess() {
		return nil, fmt.Errorf("criu: %s (error %d): %w", resp.GetCrErrmsg(), resp.GetCrErrno(), fault.ErrUnsupported)
	}
	return &resp, nil
}
