package server

import (
	"errors"
	"net"
	"net/http"
	"sync"
	"time"
)

// restTime is how long a connection may say nothing when others wait for its place.
const restTime = time.Second

// limited accepts so many connections at a time. When there are so many, one that
// waits takes the place of the one that has been without a request for longest.
type limited struct {
	net.Listener
	quiet *quiet // nil: others wait
	free  chan struct{}
	done  chan struct{}
	once  sync.Once
}

func newLimited(l net.Listener, n int, q *quiet) *limited {
	return &limited{Listener: l, quiet: q, free: make(chan struct{}, n), done: make(chan struct{})}
}

func (l *limited) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	for {
		select {
		case l.free <- struct{}{}:
			return &conn{Conn: c, of: l, free: sync.OnceFunc(func() { <-l.free })}, nil
		case <-l.done:
			return nil, errors.Join(net.ErrClosed, c.Close())
		default:
		}
		l.quiet.end(l)
		select {
		case l.free <- struct{}{}:
			return &conn{Conn: c, of: l, free: sync.OnceFunc(func() { <-l.free })}, nil
		case <-l.done:
			return nil, errors.Join(net.ErrClosed, c.Close())
		case <-time.After(restTime / 20):
		}
	}
}

func (l *limited) Close() error {
	l.once.Do(func() { close(l.done) })
	return l.Listener.Close()
}

// conn is a connection that makes room for another one when it is closed.
type conn struct {
	net.Conn
	of   *limited
	free func()
}

func (c *conn) Close() error {
	defer c.free()
	return c.Conn.Close()
}

// CloseWrite lets the other end read the last answer.
func (c *conn) CloseWrite() error {
	if w, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// quiet are the connections that have no request under way, or never had one.
type quiet struct {
	mu    sync.Mutex
	since map[net.Conn]time.Time
}

// note records each change of a connection's state.
func (q *quiet) note(c net.Conn, state http.ConnState) {
	q.mu.Lock()
	defer q.mu.Unlock()
	switch state {
	case http.StateNew, http.StateIdle:
		q.since[c] = time.Now()
	default:
		delete(q.since, c)
	}
}

// end closes the connection of a listener that has been quiet for longest, if that
// is long enough.
func (q *quiet) end(of *limited) {
	if q == nil {
		return
	}
	q.mu.Lock()
	var oldest net.Conn
	for c, since := range q.since {
		if belongs(c, of) && time.Since(since) >= restTime && (oldest == nil || since.Before(q.since[oldest])) {
			oldest = c
		}
	}
	delete(q.since, oldest)
	q.mu.Unlock()
	if oldest != nil {
		_ = raw(oldest).Close() // it is gone, whatever that says
	}
}

// raw is the connection that TLS goes over, if it does: to end that takes no
// exchange with the other side.
func raw(c net.Conn) net.Conn {
	if t, ok := c.(interface{ NetConn() net.Conn }); ok {
		return t.NetConn()
	}
	return c
}

func belongs(c net.Conn, l *limited) bool {
	own, ok := raw(c).(*conn)
	return ok && own.of == l
}
